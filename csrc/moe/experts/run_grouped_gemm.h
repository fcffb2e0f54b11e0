// The grouped GEMM as the host calls it. It needs no communicator: a device, a stream and pointers.
#pragma once

#include <string>

#include "moe/experts/grouped_gemm_args.h"

namespace moe_a2a {

// Where it runs. num_blocks: 0 for as many as the device has room for.
struct GroupedGemmPlace {
  std::string target;
  int device = 0;
  int num_blocks = 0;
  void* stream = nullptr;
};

void run_grouped_gemm(const GroupedGemmPlace& place, const GroupedGemmArgs& args);

}  // namespace moe_a2a
