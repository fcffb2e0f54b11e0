#include "arch/live_memory.h"

namespace moe_a2a {

LiveMemory& LiveMemory::of_this_process() {
  static LiveMemory memory;
  return memory;
}

void LiveMemory::add(uint64_t address, size_t nbytes) {
  const std::lock_guard lock(mutex_);
  nbytes_[address] = nbytes;
}

void LiveMemory::remove(uint64_t address) {
  const std::lock_guard lock(mutex_);
  nbytes_.erase(address);
}

size_t LiveMemory::nbytes_at(uint64_t address) const {
  const std::lock_guard lock(mutex_);
  const auto found = nbytes_.find(address);
  return found == nbytes_.end() ? 0 : found->second;
}

}  // namespace moe_a2a
