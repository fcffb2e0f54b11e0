// The communicator's own memory: what ranks tell each other independently of any client. R = num_ranks.
#pragma once

#include "comm/region.h"

namespace moe_a2a {

// A peer's clock, as measured by align_clocks. For the rank itself: offset 0, and the clock's step as round_trip.
struct ClockReading {
  int64_t offset = 0;       // peer's clock minus this rank's, in ticks; off by at most half the round trip
  uint64_t round_trip = 0;  // the shortest observed, in ticks
  uint64_t at = 0;          // this rank's clock at the measurement
};
// Most messages per exchange.
inline constexpr int kMaxClockRounds = 256;

struct CommRegion {
  // ---- symmetric
  Array<Signal, 1> clock_meeting;  // [R src]  src is ready for an exchange, or has finished it
  Array<Signal, 1> clock_message;  // [R src]  a message of the exchange; see comm/align_clocks.h
  Array<uint64_t, 2> clock_log;    // [R src, kMaxClockRounds + 1]  when src sent each message, by its clock
  Array<uint32_t, 1> poison;       // [1]  a Poison

  // ---- local
  Array<uint64_t, 1> clock_epoch;        // [R]  of the latest clock_meeting and clock_message exchanged with each rank
  Array<ClockReading, 1> clock_reading;  // [R]
  Array<HeapView, 1> heap;               // [1]  this region on every rank, for the kernels of other clients

  static CommRegion take_from(RegionLayout& symmetric, RegionLayout& local, int num_ranks) {
    return {.clock_meeting = symmetric.take<Signal>(num_ranks),
            .clock_message = symmetric.take<Signal>(num_ranks),
            .clock_log = symmetric.take<uint64_t>(num_ranks, kMaxClockRounds + 1),
            .poison = symmetric.take<uint32_t>(1),
            .clock_epoch = local.take<uint64_t>(num_ranks),
            .clock_reading = local.take<ClockReading>(num_ranks),
            .heap = local.take<HeapView>(1)};
  }
};

}  // namespace moe_a2a
