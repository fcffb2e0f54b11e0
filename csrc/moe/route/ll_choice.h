// The choices of a small or medium batch's tokens as LL words. Each is self-contained, so a receiver needs nothing else
// from that rank: expert, weight, and the batch's header. A rank without tokens sends one choice that says so.
#pragma once

#include <bit>

#include "comm/ll_word.h"
#include "moe/route/route.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

inline constexpr int kWordsPerChoice = num_ll_words(3);

// The words of a choice of one of `src`'s tokens, in this rank's heap.
MOE_A2A_DEVICE LlWord* ll_choice_at(const Context& c, int buffer, int src, int token, int k) {
  return ll_words_at(c.region.ll_choices, buffer, src, token, k * kWordsPerChoice);
}

// Called by one thread; sends to every rank.
MOE_A2A_DEVICE void send_choice(const Context& c, int buffer, uint32_t header, int token, int k, int32_t expert,
                                float weight, uint64_t epoch) {
  const uint32_t dword[3] = {static_cast<uint32_t>(expert), std::bit_cast<uint32_t>(weight), header};
  LlWord* local = ll_choice_at(c, buffer, c.heap.rank, token, k);
  for (int w = 0; w < kWordsPerChoice; ++w) {
    LlWord word;
    for (int d = 0; d < kLlData; ++d) word.data[d] = dword[w * kLlData + d];
    word.stamp = ll_stamp(epoch);
    for (int r = 0; r < c.heap.num_ranks; ++r) store_ll(c.heap.peer(r, local) + w, word);
  }
}

// Sends all choices of a token; called by one warp.
MOE_A2A_DEVICE void send_choices(const DispatchSendArgs& args, const Warp& warp, int token, uint64_t epoch) {
  const Context& c = args.context;
  RankSet ranks;
  for (int k = warp.rank(); k < c.config.num_topk; k += warp.size()) {
    const float weight = weight_of_choice(args, token, k);  // loaded first, so that neither load waits for the other
    const int32_t expert = checked_choice(args, token, k);
    send_choice(c, args.buffer, args.header(), token, k, expert, weight, epoch);
    if (expert >= 0) ranks.insert(rank_of_expert(c.config, expert));
  }
  ranks.bits = warp.reduce_or(ranks.bits);
  if (warp.rank() == 0) c.region.token_ranks(args.buffer, token) = ranks;
}

// Reads the header of `src`; true if its first choice has arrived.
MOE_A2A_DEVICE bool find_ll_header(const Context& c, int buffer, int src, uint64_t epoch, uint32_t* header) {
  uint64_t seen;
  const LlWord word = load_ll(ll_choice_at(c, buffer, src, 0, 0) + 2 / kLlData);
  *header = word.data[2 % kLlData];
  return has_epoch(word, epoch, seen);
}

// Waits for a choice; called by one thread. `expert`: the local expert, or -1 if it is elsewhere or dropped. False if
// it gave up.
MOE_A2A_DEVICE bool receive_choice(const Context& c, int buffer, int src, int token, int k, uint64_t epoch,
                                   bool is_recorded, int* expert, float* weight) {
  const LlWord* words = ll_choice_at(c, buffer, src, token, k);
  const WaitSite site{moe_op::kDispatchRecv, moe_kind::kTableWait, src, token, buffer, is_recorded};
  LlWord word[kWordsPerChoice] = {};
  const bool good = wait_until(epoch, site, c.wait, c.heap, {}, [&](uint64_t& seen) {
    bool all = true;
    for (int w = 0; w < kWordsPerChoice; ++w) {
      word[w] = load_ll(words + w);
      all &= has_epoch(word[w], epoch, seen);
    }
    return all;
  });
  *expert = local_expert(c.config, static_cast<int32_t>(word[0].data[0]));
  *weight = std::bit_cast<float>(word[1 / kLlData].data[1 % kLlData]);
  return good;
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
