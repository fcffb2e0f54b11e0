// Which slice is drawn on which track, in which order.
#pragma once

#include <string>

#include "trace_export/timeline.h"

namespace moe_a2a::trace_export {

// Slices of one warp that are disjoint or nested: Perfetto before v57 cuts or drops slices that overlap partially
// (google/perfetto#1656).
struct Track {
  int32_t rank;
  int32_t block;  // kNone: the rank's phases
  std::string name;
  std::vector<int64_t> slices;  // indices, by begin, outer slices first
};

// All tracks, by rank (its phases first), block, warp. A warp has one track; if waits of its threads overlap partially,
// it gets another for each wait that does not fit on the previous ones. Nothing nests in a wait that an arrow ends in,
// except its flight.
std::vector<Track> lay_out(const Timeline& timeline);

// The arrows that leave and reach each slice, kNone: no arrow. Arrows are indices into Timeline::arrows.
struct ArrowEnds {
  std::vector<int64_t> leaving;
  std::vector<int64_t> arriving;
};
ArrowEnds ends_of(const Timeline& timeline);

// When an arrow's flight begins: after the signal, since a reader that meets the sink first loses the arrow; and within
// its wait, whatever the clocks say.
int64_t flight_begin_ns(const Timeline& timeline, int64_t arrow);
inline constexpr const char* kFlight = "flight";

// The track and the counter that show at a glance what a rank does.
inline constexpr const char* kPhases = "phases";
inline constexpr const char* kWaiting = "% of the warps that wait";

// The name of the initial instant that carries Timeline::about.
inline constexpr const char* kAbout = "about this trace";

// In Chrome's format a rank is a process, a track a thread. Perfetto shows the ids after the names. Some have a
// meaning: 0 is the kernel's idle task, and a thread whose id is its process's is the main thread.
inline constexpr int kAboutThread = 10'000;
inline int process_id(int32_t rank) { return 1000 + rank; }
inline int thread_id(size_t track) { return kAboutThread + 1 + static_cast<int>(track); }

// The ranks that have a slice or a sample, ascending.
std::vector<int32_t> ranks_of(const Timeline& timeline);

}  // namespace moe_a2a::trace_export
