// The host's entry to the grouped GEMM. It needs no communicator: just a device, a stream and pointers.
#pragma once

#include <string>

#include "moe/experts/grouped_gemm_args.h"

namespace moe_a2a {

// num_blocks 0: as many as the device can hold.
struct GroupedGemmPlace {
  std::string target;
  int device = 0;
  int num_blocks = 0;
  void* stream = nullptr;
};

// In the order of the stream.
void clear(const GroupedGemmPlace& place, void* memory, size_t nbytes);

void run_grouped_gemm(const GroupedGemmPlace& place, const GroupedGemmArgs& args);

}  // namespace moe_a2a
