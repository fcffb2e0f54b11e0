// The trace of one rank as the host sees it: its memory, switching it on and off, reading it, and how the clocks of the
// other ranks stand to this one's.
#pragma once

#include <cstdint>
#include <vector>

#include "comm/context.h"
#include "comm/device.h"

namespace moe_a2a {

// What the kernels have left since start().
struct TraceDump {
  std::vector<TraceRecord> records;      // segment after segment
  std::vector<int64_t> segment_written;  // [segments]
  std::vector<int64_t> segment_dropped;  // [segments]  for want of room
};

class Tracer {
 public:
  // Switches the trace of `context`, which every launch is given.
  Tracer(Device& device, CommContext& context) : device_(device), context_(context) {}

  // On, and empty; with room for that many records per segment, or more if a call before has asked for more. The memory
  // comes from the first call and stays until the object ends: a graph goes on recording where it was captured.
  void start(int64_t records_per_segment);
  void stop() { context_.wait.trace = {}; }
  // Waits for the device. Also when the trace is off again, and after a timeout.
  TraceDump read() const;

  // One reading per rank. Every rank calls it with the same number of rounds; the caller then asks for reports, since a
  // rank may not have come.
  std::vector<ClockReading> align_clocks(int num_rounds, void* stream);
  // The smallest step of the clock, as the newest align_clocks() has seen it; 0: none yet.
  uint64_t clock_step() const { return clock_step_; }

 private:
  int64_t num_segments() const;

  Device& device_;
  CommContext& context_;
  TraceBuffer buffer_;
  uint64_t clock_step_ = 0;
};

}  // namespace moe_a2a
