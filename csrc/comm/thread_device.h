// Devices for kernels that need no communicator.
#pragma once

#include <string>

#include "comm/kernel_family.h"

namespace moe_a2a {

// A device with the family's kernels loaded. One per thread, since a CPU device runs one launch at a time, and a new
// one in a forked child.
Device& device_of_thread(const std::string& target, int index, KernelFamily (*family)(const std::string& target));

}  // namespace moe_a2a
