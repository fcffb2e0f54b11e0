// Which slice is drawn on which track, in which order.
#pragma once

#include <string>

#include "trace_export/timeline.h"

namespace moe_a2a::trace_export {

// A line of slices of one warp that lie beside or inside each other, never across each other's ends: Perfetto before
// v57 cuts or deletes those that do (google/perfetto#1656).
struct Track {
  int32_t rank;
  std::string name;
  std::vector<int64_t> slices;  // indices: by begin, the outer one first
};

// All tracks, by rank, block, warp. A warp has one; where its threads were in waits at once that end across each other,
// it has another one for each that does not fit on those before. Nothing lies inside a wait that an arrow ends in, but
// its flight.
std::vector<Track> lay_out(const Timeline& timeline);

// The arrows that leave and reach each slice, kNone: no arrow. An arrow's number is its index in the timeline.
struct ArrowEnds {
  std::vector<int64_t> leaving;
  std::vector<int64_t> arriving;
};
ArrowEnds ends_of(const Timeline& timeline);

// When the flight of an arrow begins: after the signal, or a reader that meets the sink first loses the arrow; and
// inside its wait, whatever the clocks say.
int64_t flight_begin_ns(const Timeline& timeline, int64_t arrow);
inline constexpr const char* kFlight = "flight";

// The name of the moment at the beginning that carries Timeline::about.
inline constexpr const char* kAbout = "about this trace";

// A rank is a process, a track is a thread. Perfetto shows the ids behind the names. Small ones are taken: 0 is the
// kernel's idle task, and a thread with its process's id is the main thread.
inline constexpr int kAboutThread = 10'000;
inline int process_id(int32_t rank) { return 1000 + rank; }
inline int thread_id(size_t track) { return kAboutThread + 1 + static_cast<int>(track); }

// The ranks that have a slice or a sample, in ascending order.
std::vector<int32_t> ranks_of(const Timeline& timeline);

}  // namespace moe_a2a::trace_export
