// Trace records as Python reads them: plain tensors and lists, in the format of comm/trace_buffer.h.
#pragma once

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "bindings/python.h"
#include "moe/expert_parallel.h"

namespace moe_a2a::bindings {

// A dict of: records [written, 2] int64, the two words of each, segment after segment; segment_written and
// segment_dropped [segments] int64; warps_per_block; ticks_per_second; clock_step_ticks, 0 before the first
// align_clocks().
py::dict read_trace(ExpertParallel& ep);

// Names by the codes that records hold.
std::vector<std::string> trace_kinds();
std::vector<std::string> trace_operations();

}  // namespace moe_a2a::bindings
