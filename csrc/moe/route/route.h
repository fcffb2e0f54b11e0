// Where a token goes. Nothing is sorted and no slot is handed out: a token lands at its own index, so sender and
// receiver know every address from the choices alone.
#pragma once

#include "moe/args.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

MOE_A2A_DEVICE int rank_of_expert(const MoeConfig& config, int32_t expert) {
  return expert / config.num_local_experts();
}

// Enough of them to tell 0 ... count - 1 and -1 apart.
MOE_A2A_DEVICE int bits_of_values(int count) {
  int bits = 1;
  MOE_A2A_ROLLED
  while (1 << bits <= count) ++bits;
  return bits;
}

// Which threads of a block see to which choices of tokens on a line: neighbours to those of one token.
struct ChoiceThreads {
  int per_token = 1;  // threads, a power of two
  int num_tokens;     // side by side
  int token, k;       // what this thread begins with

  MOE_A2A_DEVICE ChoiceThreads(const Block& block, int num_topk) {
    while (per_token < num_topk && per_token < block.size()) per_token *= 2;
    num_tokens = block.size() / per_token;
    token = block.rank() / per_token;
    k = block.rank() % per_token;
  }
};

// The local expert of a choice, -1 when it lives elsewhere or is dropped.
MOE_A2A_DEVICE int local_expert(const MoeConfig& config, int32_t expert) {
  const int local = expert - config.rank * config.num_local_experts();
  return expert >= 0 && local >= 0 && local < config.num_local_experts() ? local : -1;
}

// A choice as the table carries it, -1 when dropped. An id out of range is dropped: the host refuses it where it can
// see it; that of a tensor on a device is counted here and raised at the next call that looks (ExpertParallel::check).
MOE_A2A_DEVICE int32_t checked_choice(const DispatchSendArgs& args, int token, int k) {
  const int64_t expert = args.topk_idx[static_cast<int64_t>(token) * args.context.config.num_topk + k];
  if (expert >= -1 && expert < args.context.config.num_experts) return static_cast<int32_t>(expert);
  ErrorCounters* errors = args.context.ws.errors.data;
  const uint32_t place =
      atomic_add<Order::kRelaxed, Scope::kDevice>(&errors->num_bad_choices, 1u) % ErrorCounters::kShown;
  errors->bad_expert[place] = expert;
  errors->bad_token[place] = token;
  return -1;
}

// The distinct ranks that own a token's experts, read side by side by the group, before any table exists.
template <class Group>
MOE_A2A_DEVICE RankSet destinations(const Group& group, const DispatchSendArgs& args, int token) {
  const MoeConfig& config = args.context.config;
  RankSet ranks;
  for (int k = group.rank(); k < config.num_topk; k += group.size()) {
    const int64_t expert = args.topk_idx[static_cast<int64_t>(token) * config.num_topk + k];
    if (expert >= 0 && expert < config.num_experts) ranks.insert(rank_of_expert(config, static_cast<int32_t>(expert)));
  }
  return {group.union_of(ranks.bits)};
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
