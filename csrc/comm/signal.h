// A word that one rank writes and another waits for: a monotone epoch and a small payload.
//
//   bits 63..20  epoch: how many times the guarded memory was handed over; never reset
//   bits 19..0   payload: what the reader learns beside the epoch (a batch's header, an attempt, a row's codec)
//
// Between ranks, raising a signal is the only release, and the acquires are in wait.h. Within a rank, count_block()
// (launch_count.h), is_closing_warp() (arch) and SignalQueue order blocks and warps; a Report is released by
// write_report() and acquired by the host (client.cpp).
#pragma once

#include <cstdint>

#include "arch/arch.h"
#include "comm/heap_view.h"
#include "comm/rank_set.h"
#include "comm/trace_buffer.h"

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
  // Whether `word` carries `epoch` or a later one. The difference is taken at the epoch's own width, so the epoch may
  // wrap. To pass for a new one, a word would have to stay unwritten for 2^43 epochs (three years at one per 10 us).
  MOE_A2A_HOST_DEVICE static bool reached(uint64_t word, uint64_t epoch) {
    return static_cast<int64_t>((word & ~uint64_t{kPayloadMask}) - (epoch << kPayloadBits)) >= 0;
  }
};

}  // namespace moe_a2a

namespace moe_a2a::inline MOE_A2A_TARGET {

// Trace arrows start here and end in the waits of `ranks` for the token.
MOE_A2A_DEVICE void append_signals(const TraceBuffer& trace, const RankSet& ranks, int token, uint64_t now) {
  for (RankSet rest = ranks; !rest.empty(); rest.remove_first()) {
    append(trace, {.kind = TraceKind::kSignal, .begin = now, .peer = rest.first(), .token = token}, now);
  }
}

// One record for LL words that the group has written to `ranks` since `begin`. It stands for the send and, at `begin`,
// for the signals, since LL words carry their own epoch. `polls` holds the ranks as bits, kRanks per record, from
// `peer` on.
template <class Group>
MOE_A2A_DEVICE void record_send_ll(const TraceBuffer& trace, const Group& group, const RankSet& ranks, int token,
                                   uint64_t begin) {
  if (!kRecording || !trace_is_on() || group.rank() != 0) return;
  constexpr int kRanks = TraceRecord::kPollBits;
  const uint64_t now = clock_now();
  int first = 0;
  MOE_A2A_ROLLED
  for (uint64_t rest = ranks.bits; rest != 0; rest >>= kRanks, first += kRanks) {
    const uint32_t some = rest & TraceRecord::kMaxPolls;
    if (some == 0) continue;
    append(trace, {.kind = TraceKind::kSendLl, .begin = begin, .peer = first, .token = token, .polls = some}, now);
  }
}

// The stores of signal_many(), for several behind one fence_before_signals().
MOE_A2A_DEVICE void store_signals(const HeapView& heap, const RankSet& ranks, Signal* local, uint64_t epoch,
                                  uint32_t payload = 0) {
  for (RankSet rest = ranks; !rest.empty(); rest.remove_first()) {
    Signal* remote = heap.peer(rest.first(), local);
    atomic_store<kSignalOrder, Scope::kSystem>(&remote->word, Signal::pack(epoch, payload));
  }
}

// Publishes `epoch` in `local`'s place on every rank of `ranks`. Everything that this thread wrote, or its group before
// the group's release_sync(), is visible to any thread that sees the epoch: pairs with the acquire in wait_for(). One
// fence covers all ranks: a fence per signal costs 20 % of the link on H200, and a fence stalls the whole SM. Returns
// the time between the fence and the stores, so that no wait appears to end before its signal.
MOE_A2A_DEVICE uint64_t signal_many(const HeapView& heap, const RankSet& ranks, Signal* local, uint64_t epoch,
                                    uint32_t payload = 0) {
  fence_before_signals();
  const uint64_t now = trace_now();
  store_signals(heap, ranks, local, epoch, payload);
  return now;
}

// signal_many() for what this rank's earlier launches did. No fence is needed where the end of a launch is a release.
MOE_A2A_DEVICE void signal_earlier_launches(const HeapView& heap, const RankSet& ranks, Signal* local, uint64_t epoch,
                                            uint32_t payload = 0) {
  if constexpr (!kLaunchesRelease) fence_before_signals();
  store_signals(heap, ranks, local, epoch, payload);
}

// signal_many() for a token's row or sum, plus a trace record per signal. Recorded after the stores, so as not to delay
// a signal.
MOE_A2A_DEVICE void signal_token(const HeapView& heap, const RankSet& ranks, Signal* local, uint64_t epoch,
                                 uint32_t payload, const TraceBuffer& trace, int token) {
  const uint64_t now = signal_many(heap, ranks, local, epoch, payload);
  if (kRecording && trace_is_on()) append_signals(trace, ranks, token, now);
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
