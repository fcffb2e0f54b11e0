// The trace of one client on one rank as the host sees it: its memory, switching it on and off, reading it.
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
  // Switches the trace of `context`, which every launch of the client is given.
  Tracer(Device& device, ClientContext& context) : device_(device), context_(context) {}

  // On, and empty; with room for that many records per segment, or more if a call before has asked for more. The memory
  // comes from the first call and stays until the object ends: a graph goes on recording where it was captured.
  void start(int64_t records_per_segment);
  void stop() { context_.wait.trace = {}; }
  // Waits for the device. Also when the trace is off again, and after a timeout.
  TraceDump read() const;

 private:
  int64_t num_segments() const;

  Device& device_;
  ClientContext& context_;
  TraceBuffer buffer_;
};

}  // namespace moe_a2a
