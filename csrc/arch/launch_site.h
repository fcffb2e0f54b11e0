// Where a kernel is launched, in terms common to all targets.
#pragma once

#include <cstdint>

namespace moe_a2a {

class BlockPool;

struct LaunchSite {
  int device = 0;                   // GPU
  BlockPool* block_pool = nullptr;  // CPU
  int64_t max_shared_bytes = 0;     // per block
  int num_blocks = 1;
  void* stream = nullptr;
};

}  // namespace moe_a2a
