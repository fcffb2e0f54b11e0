// A trace on one rank, from the host: allocating it, switching it, reading it.
#pragma once

#include <cstdint>
#include <vector>

#include "arch/device.h"
#include "comm/trace_buffer.h"

namespace moe_a2a {

// What the kernels have recorded since start().
struct TraceDump {
  std::vector<TraceRecord> records;      // segment after segment
  std::vector<int64_t> segment_written;  // [segments]
  std::vector<int64_t> segment_dropped;  // [segments]  for lack of room
};

class Tracer {
 public:
  // Switches `shown`, which is passed to every launch that is to be recorded.
  Tracer(Device& device, TraceBuffer& shown) : device_(device), shown_(shown) {}

  // Turns the trace on, empty. Memory only grows and is kept until the object ends: a captured graph keeps recording
  // where it was captured. read() returns the first records_per_segment of each segment; the others count as dropped.
  void start(int64_t records_per_segment);
  void stop() { shown_ = {}; }
  // Synchronizes the device. Also valid after stop() and after a timeout.
  TraceDump read() const;

 private:
  int64_t num_segments() const;

  Device& device_;
  TraceBuffer& shown_;
  TraceBuffer buffer_;  // of the largest trace so far
  uint32_t records_per_segment_ = 0;
};

}  // namespace moe_a2a
