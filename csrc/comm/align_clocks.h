// Measures how far each rank's clock is ahead of this rank's, by ping-pong messages over the heap, one pair of ranks at
// a time. A peer's timestamp falls between this rank's timestamps before and after it; the tightest such pair wins.
#pragma once

#include "comm/context.h"

namespace moe_a2a {

// Every rank passes the same num_rounds, 2 ... kMaxClockRounds.
struct AlignClocksArgs {
  CommContext context;
  int num_rounds = 0;
};

}  // namespace moe_a2a

namespace moe_a2a::inline MOE_A2A_TARGET {

struct AlignClocks {
  using Args = AlignClocksArgs;
  static constexpr const char* kName = "align_clocks";

  // In step s, ranks i and j with i + j = s (mod R) meet: each pair once, no rank twice in a step. One thread does all
  // the work.
  MOE_A2A_DEVICE static void run(const Args& args, const Grid&, const Block& block, std::byte*) {
    const CommContext& c = args.context;
    if (block.rank() != 0) return;
    measure_own(c);
    for (int step = 0; step < c.heap.num_ranks; ++step) {
      const int peer = (step - c.heap.rank + c.heap.num_ranks) % c.heap.num_ranks;
      if (peer != c.heap.rank && !exchange(args, peer)) return;
    }
  }

  // This rank against itself: offset 0, and the smallest observed clock step.
  MOE_A2A_DEVICE static void measure_own(const CommContext& c) {
    constexpr int kNumSteps = 64;
    uint64_t smallest = ~uint64_t{0}, before = clock_now();
    for (int i = 0; i < kNumSteps;) {
      const uint64_t now = clock_now();
      if (now == before) continue;
      smallest = now - before < smallest ? now - before : smallest;
      before = now;
      ++i;
    }
    c.region.clock_reading(c.heap.rank) = {0, smallest, before};
  }

  MOE_A2A_DEVICE static bool exchange(const Args& args, int peer) {
    const CommContext& c = args.context;
    uint64_t& epoch = c.region.clock_epoch(peer);
    if (!meet(c, peer, ++epoch)) return false;  // the peer no longer reads the previous exchange
    if (!volley(args, peer, epoch)) return false;
    epoch += args.num_rounds;
    if (!meet(c, peer, ++epoch)) return false;  // all timestamps have arrived
    c.region.clock_reading(peer) = closest_pair(args, peer);
    return true;
  }

  MOE_A2A_DEVICE static bool meet(const CommContext& c, int peer, uint64_t epoch) {
    signal_many(c.heap, RankSet::only(peer), c.region.clock_meeting.at(c.heap.rank), epoch);
    return wait_for(c.region.clock_meeting.at(peer), epoch, site_of(peer), c.wait, c.heap);
  }

  static constexpr MOE_A2A_DEVICE WaitSite site_of(int peer) {
    return {Operation::kAlignClocks, TraceKind::kClockWait, peer};
  }

  // The lower rank serves. Messages are relaxed: nothing behind them is read before the ranks meet again, and a fence
  // would distort the measurement. They use a separate word, so that a rank that is late to the meeting cannot take a
  // message, which orders nothing, for the meeting. Each timestamp is logged both locally and at the peer.
  MOE_A2A_DEVICE static bool volley(const Args& args, int peer, uint64_t epoch) {
    const CommContext& c = args.context;
    const bool serves = c.heap.rank < peer;
    Signal* own = c.heap.peer(peer, c.region.clock_message.at(c.heap.rank));
    for (int i = 0; i < args.num_rounds; ++i) {
      if (!serves && !await(c, peer, epoch + i + 1)) return false;
      const uint64_t now = clock_now();
      atomic_store<Order::kRelaxed, Scope::kSystem>(&own->word, Signal::pack(epoch + i + 1, 0));
      c.region.clock_log(c.heap.rank, i) = now;
      *c.heap.peer(peer, c.region.clock_log.at(c.heap.rank, i)) = now;
      if (serves && !await(c, peer, epoch + i + 1)) return false;
    }
    c.region.clock_log(c.heap.rank, args.num_rounds) = clock_now();
    return true;
  }

  MOE_A2A_DEVICE static bool await(const CommContext& c, int peer, uint64_t epoch) {
    return wait_for<Order::kRelaxed>(c.region.clock_message.at(peer), epoch, site_of(peer), c.wait, c.heap);
  }

  // This rank's timestamps i and i + 1 enclose the peer's i, or the peer's i + 1 where the peer serves.
  MOE_A2A_DEVICE static ClockReading closest_pair(const Args& args, int peer) {
    const CommContext& c = args.context;
    const int first = c.heap.rank < peer ? 0 : 1;
    ClockReading best{0, ~uint64_t{0}, 0};
    for (int i = 0; i + first < args.num_rounds; ++i) {
      const uint64_t before = c.region.clock_log(c.heap.rank, i), after = c.region.clock_log(c.heap.rank, i + 1);
      if (after - before >= best.round_trip) continue;
      const uint64_t middle = before + (after - before) / 2;
      best = {static_cast<int64_t>(c.region.clock_log(peer, i + first) - middle), after - before, middle};
    }
    return best;
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
