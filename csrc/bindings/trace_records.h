// Trace records as Python reads them: plain tensors and lists, in the format of comm/trace_buffer.h.
#pragma once

#include <string>
#include <vector>

#include "bindings/python.h"
#include "comm/communicator.h"

namespace moe_a2a::bindings {

// Room for that many records per warp of every launch of the client, from now on.
void start_trace(Client& client, int64_t records);
void stop_trace(Client& client);
// A dict of: records [written, 2] int64, the two words of each, segment after segment; segment_written and
// segment_dropped [segments] int64, those of the second tracer behind those of the first; warps_per_block;
// ticks_per_second; clock_step_ticks, 0 before the first align_clocks().
py::dict read_trace(Client& client, const Communicator& comm);

// Names by the codes that records hold.
std::vector<std::string> trace_kinds();
std::vector<std::string> trace_operations();

}  // namespace moe_a2a::bindings
