#include "arch/live_memory.h"

#include <stdexcept>
#include <string>

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

void LiveMemory::require(uint64_t address, size_t nbytes) const {
  const std::lock_guard lock(mutex_);
  const auto found = nbytes_.find(address);
  if (found == nbytes_.end()) throw std::runtime_error("a rank of this process has closed its heap already");
  if (found->second == nbytes) return;
  throw std::invalid_argument("a heap of this process has " + std::to_string(found->second) + " bytes, expected " +
                              std::to_string(nbytes));
}

}  // namespace moe_a2a
