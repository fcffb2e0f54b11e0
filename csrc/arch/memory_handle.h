// What a rank sends the others so that they can map its symmetric heap. Plain bytes without padding: any channel can
// carry them, and they can be compared and checksummed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "arch/process.h"

namespace moe_a2a {

struct MemoryHandle {
  uint64_t nbytes = 0;
  uint64_t address = 0;     // in the owning process: ranks that are its threads use it directly
  uint64_t machine_id = 0;  // ranks on different machines cannot map each other
  ProcessIdentity process;
  int64_t device = -1;
  char opaque[64] = {};  // where the file is (FileLocation), or the vendor's IPC handle
};
static_assert(std::has_unique_object_representations_v<MemoryHandle>);

// Identifies this machine since its last boot.
uint64_t this_machine_id();

// Throws std::runtime_error for the handle of a rank on another machine.
void require_this_machine(const MemoryHandle& handle);

// For the handle of a rank of this process, whose heap has `nbytes` (0: it is closed): throws unless the handle says
// the same.
void require_live(const MemoryHandle& handle, size_t nbytes);

}  // namespace moe_a2a
