// The communicator's own memory: what ranks tell each other regardless of any client. R = num_ranks.
#pragma once

#include "comm/region.h"

namespace moe_a2a {

// What an exchange of messages has told about a rank's clock. Of the rank itself: no offset, and the clock's step.
struct ClockReading {
  int64_t offset = 0;       // how far the peer's clock is ahead, in ticks; wrong by at most half the round trip
  uint64_t round_trip = 0;  // the shortest that was seen
  uint64_t at = 0;          // by this rank's clock
};
// Most messages of one exchange.
inline constexpr int kMaxClockRounds = 256;

struct CommRegion {
  // ---- symmetric
  Array<Signal, 1> clock_meeting;  // [R src]  src is ready for an exchange of messages, or has ended it
  Array<Signal, 1> clock_message;  // [R src]  one of the messages; see comm/align_clocks.h
  Array<uint64_t, 2> clock_log;    // [R src, kMaxClockRounds + 1]  by the clock of src, when it sent each of them
  Array<uint32_t, 1> poison;       // [1]  0, or (rank that gave up + 1) << 8 | (rank it waited for + 1)

  // ---- local
  Array<uint64_t, 1> clock_epoch;        // [R]  of the newest clock_meeting and clock_message exchanged with each rank
  Array<ClockReading, 1> clock_reading;  // [R]

  static CommRegion take_from(RegionLayout& symmetric, RegionLayout& local, int num_ranks) {
    return {.clock_meeting = symmetric.take<Signal>(num_ranks),
            .clock_message = symmetric.take<Signal>(num_ranks),
            .clock_log = symmetric.take<uint64_t>(num_ranks, kMaxClockRounds + 1),
            .poison = symmetric.take<uint32_t>(1),
            .clock_epoch = local.take<uint64_t>(num_ranks),
            .clock_reading = local.take<ClockReading>(num_ranks)};
  }
};

}  // namespace moe_a2a
