// Where a token goes. Nothing is sorted and no slot is allocated: a token's slot is its own index on every rank, so
// sender and receiver derive every address from the choices alone.
#pragma once

#include "moe/args.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// expert >= 0
MOE_A2A_DEVICE int rank_of_expert(const MoeConfig& config, int32_t expert) {
  return config.by_local_experts.divide(expert).quotient;
}

// Bits that distinguish the values 0 ... count - 1 and -1.
MOE_A2A_DEVICE int bits_of_values(int count) {
  int bits = 1;
  MOE_A2A_ROLLED
  while (1 << bits <= count) ++bits;
  return bits;
}

// Maps a block's threads onto the choices of consecutive tokens: neighbouring threads share a token.
struct ChoiceThreads {
  int per_token;   // threads per token, a power of two
  int num_tokens;  // handled side by side
  int token, k;    // this thread's first

  MOE_A2A_DEVICE ChoiceThreads(const Block& block, int num_topk) {
    int log2 = 0;  // of per_token
    while (1 << log2 < num_topk && 1 << log2 < block.size()) ++log2;
    per_token = 1 << log2;
    num_tokens = block.size() >> log2;
    token = block.rank() >> log2;
    k = block.rank() & (per_token - 1);
  }
};

// The local expert of a choice; -1 if it is elsewhere or dropped.
MOE_A2A_DEVICE int local_expert(const MoeConfig& config, int32_t expert) {
  const int local = expert - config.rank * config.num_local_experts;
  return expert >= 0 && local >= 0 && local < config.num_local_experts ? local : -1;
}

// A choice as it travels; -1: dropped. An id out of range counts as dropped. The host rejects it where it can see it;
// in a device tensor it is counted here and raised by the next raise_reported().
MOE_A2A_DEVICE int32_t checked_choice(const DispatchSendArgs& args, int token, int k) {
  const int64_t expert = args.topk_idx[static_cast<int64_t>(token) * args.context.config.num_topk + k];
  if (expert >= -1 && expert < args.context.config.num_experts) return static_cast<int32_t>(expert);
  ErrorCounters* errors = args.context.region.errors.data;
  const uint32_t place =
      atomic_add<Order::kRelaxed, Scope::kDevice>(&errors->num_bad_choices, 1u) % ErrorCounters::kShown;
  errors->bad_expert[place] = expert;
  errors->bad_token[place] = token;
  return -1;
}
MOE_A2A_DEVICE float weight_of_choice(const DispatchSendArgs& args, int token, int k) {
  return args.topk_weights != nullptr ? args.topk_weights[int64_t{token} * args.context.config.num_topk + k] : 1.0f;
}

// The distinct ranks that own a token's experts, read by the group in parallel before any table exists.
template <class Group>
MOE_A2A_DEVICE RankSet dst_ranks_of(const Group& group, const DispatchSendArgs& args, int token) {
  const MoeConfig& config = args.context.config;
  RankSet ranks;
  for (int k = group.rank(); k < config.num_topk; k += group.size()) {
    const int64_t expert = args.topk_idx[static_cast<int64_t>(token) * config.num_topk + k];
    if (expert >= 0 && expert < config.num_experts) ranks.insert(rank_of_expert(config, static_cast<int32_t>(expert)));
  }
  return {group.reduce_or(ranks.bits)};
}

// ---- counting, shared by the sender of a table and the receiver of LL choices

// One warp numbers the values of [begin, end): visit(i, value, idx), where idx is counters[value] plus the number of
// equal values before i. Advances the counters. value_of(i) is in [0, 2^num_bits - 1), or -1 for values to skip.
template <class ValueOf, class Visit>
MOE_A2A_DEVICE void number_equal(const Warp& warp, int begin, int end, int num_bits, int32_t* counters,
                                 const ValueOf& value_of, const Visit& visit) {
  MOE_A2A_ROLLED
  for (int base = begin; base < end; base += warp.size()) {
    const int i = base + warp.rank();
    const int value = i < end ? value_of(i) : -1;
    const Matches matches = warp.matches(value, num_bits);
    if (value >= 0) visit(i, value, counters[value] + matches.before);
    warp.sync();  // all lanes have read before one advances the counter
    if (value >= 0 && matches.before == 0) counters[value] += matches.total;
    warp.sync();
  }
}

// One warp numbers the i of [begin, end) with is_in(i): visit(i, idx), with idx -1 for the others. Returns their
// number.
template <class IsIn, class Visit>
MOE_A2A_DEVICE int32_t number_members(const Warp& warp, int begin, int end, const IsIn& is_in, const Visit& visit) {
  int32_t num = 0;
  MOE_A2A_ROLLED
  for (int base = begin; base < end; base += warp.size()) {
    const int i = base + warp.rank();
    const bool in = i < end && is_in(i);
    const Matches matches = warp.matches(in);
    if (i < end) visit(i, in ? num + matches.before : -1);
    num += in ? matches.total : warp.size() - matches.total;
  }
  return num;
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
