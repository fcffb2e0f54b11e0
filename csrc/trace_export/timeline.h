// Input of the exporters: the slices of all ranks on one clock, the arrows between them, and counters.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace moe_a2a::trace_export {

inline constexpr int32_t kNone = -1;

// What one warp did, in nanoseconds on the merged clock; if `block` is kNone, a phase of its rank. In other fields
// kNone means unknown or not applicable. moe_a2a/tracing/timeline.py has the same record.
struct Slice {
  int64_t begin_ns;
  int64_t end_ns;
  int64_t bytes;
  int32_t rank;
  int32_t block;
  int32_t warp;
  int32_t name;  // index into Timeline::slice_names
  int32_t peer;
  int32_t token;
  int32_t polls;
  int32_t expert;   // of a tile
  int32_t rows;     // of a tile
  int32_t instant;  // 1: an instant, without duration
};

// From the slice that raised a signal to the wait that it ended: indices into Timeline::slices.
//
// In the file an arrow ends in a slice "flight", the last part of the wait, from the signal on. An arrow to the wait
// itself would be reversed: Perfetto takes the earlier of two slices for the source, and the UI draws an arrow to the
// left edge of its sink.
struct Arrow {
  int64_t source;
  int64_t sink;
};

struct CounterSample {
  int64_t time_ns;
  int64_t value;
  int32_t rank;
  int32_t name;  // index into Timeline::counter_names
};

struct Timeline {
  std::span<const Slice> slices;
  std::span<const Arrow> arrows;
  std::span<const CounterSample> samples;  // by time
  std::vector<std::string> slice_names;
  std::vector<std::string> counter_names;
  std::string about;  // a JSON object: metadata of the whole trace
};

// Receives the file piece by piece.
using Sink = std::function<void(std::string_view)>;

// Chrome's trace event format, as JSON.
void write_chrome_json(const Timeline& timeline, const Sink& sink);

// Perfetto's protobuf format.
void write_perfetto(const Timeline& timeline, const Sink& sink);

}  // namespace moe_a2a::trace_export
