// What a rank tells the others so that they can map its symmetric heap. Plain bytes: any channel may carry them.
#pragma once

#include <cstdint>

namespace moe_a2a {

struct MemoryHandle {
  uint64_t nbytes = 0;
  uint64_t address = 0;     // in the process that owns the memory: threads of one process share it as it is
  uint64_t machine_id = 0;  // ranks on different machines cannot map each other
  int32_t pid = 0;
  int32_t device = -1;
  char opaque[64] = {};  // shared-memory name, or the vendor's handle
};

// Identifies this machine since its last start.
uint64_t this_machine_id();

}  // namespace moe_a2a
