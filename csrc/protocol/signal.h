// A word that one rank writes and another waits for: an epoch that only grows, and a small payload beside it.
//
//   bits 63..20  epoch: how many times the guarded memory was handed over; never reset
//   bits 19..0   payload: the message header that fits the doorbell (a number of tokens, an attempt)
//
// Release and acquire occur in this file and in wait.h, nowhere else.
#pragma once

#include <cstdint>

#include "protocol/rank_set.h"
#include "symmetric_memory/heap_view.h"
#include "target/target.h"

namespace moe_a2a {

struct Signal {
  static constexpr int kPayloadBits = 20;
  static constexpr uint32_t kPayloadMask = (1u << kPayloadBits) - 1;

  uint64_t word = 0;

  MOE_A2A_HOST_DEVICE static uint64_t pack(uint64_t epoch, uint32_t payload) {
    return (epoch << kPayloadBits) | payload;
  }
  MOE_A2A_HOST_DEVICE static uint64_t epoch_of(uint64_t word) { return word >> kPayloadBits; }
  MOE_A2A_HOST_DEVICE static uint32_t payload_of(uint64_t word) { return static_cast<uint32_t>(word) & kPayloadMask; }
  // Whether `word` carries `epoch` or a later one. The difference is taken in the epoch's own width, so the count may
  // wrap; a word would have to rest for 2^43 epochs (three years of one every 10 us) to be taken for a new one.
  MOE_A2A_HOST_DEVICE static bool reached(uint64_t word, uint64_t epoch) {
    return static_cast<int64_t>((word & ~uint64_t{kPayloadMask}) - (epoch << kPayloadBits)) >= 0;
  }
};

}  // namespace moe_a2a

namespace moe_a2a::inline MOE_A2A_TARGET {

// A signal of several ranks, at the place of `local` on each.
struct SharedSignal {
  RankSet ranks;
  Signal* local = nullptr;
};

// Publishes `epoch` in all signals that visit_all(publish) hands to `publish`, by one fence: signal_many() for many.
// What a fence costs it costs the whole SM: 16 warps with one each are slower than one for their block (H200: 11 us,
// not 6).
template <class VisitAll>
MOE_A2A_DEVICE void signal_batch(const HeapView& heap, uint64_t epoch, VisitAll visit_all) {
  fence_before_signals();
  visit_all([&](SharedSignal signal) {
    for (; !signal.ranks.empty(); signal.ranks.remove_first()) {
      Signal* remote = heap.peer(signal.ranks.first(), signal.local);
      atomic_store<kSignalOrder, Scope::kSystem>(&remote->word, Signal::pack(epoch, 0));
    }
  });
}

// Publishes `epoch` in the signal at the place of `local` on every rank of `ranks`. Everything that this thread wrote,
// or that its group wrote before the group's release_sync(), is visible to whoever then sees the epoch: pairs with the
// acquire in wait_for(). One fence covers all the signals (a fence per signal costs 20 % of the link on H200).
MOE_A2A_DEVICE void signal_many(const HeapView& heap, RankSet ranks, Signal* local, uint64_t epoch,
                                uint32_t payload = 0) {
  fence_before_signals();
  for (; !ranks.empty(); ranks.remove_first()) {
    atomic_store<kSignalOrder, Scope::kSystem>(&heap.peer(ranks.first(), local)->word, Signal::pack(epoch, payload));
  }
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
