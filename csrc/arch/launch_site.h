// Where a kernel is launched, in words that every target shares.
#pragma once

#include <cstdint>

namespace moe_a2a {

class BlockPool;

struct LaunchSite {
  int device = 0;                   // of a GPU
  BlockPool* block_pool = nullptr;  // of the CPU
  int64_t max_shared_bytes = 0;     // that a block may use
  int num_blocks = 1;
  void* stream = nullptr;
};

}  // namespace moe_a2a
