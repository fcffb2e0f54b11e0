// This process's symmetric heaps on devices, by address. Ranks that are threads of one process use each other's heaps
// directly; an address from a handle is used only if a heap of that size is live there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

namespace moe_a2a {

class LiveMemory {
 public:
  static LiveMemory& of_this_process();

  void add(uint64_t address, size_t nbytes);
  void remove(uint64_t address);
  // The size of the heap at this address; 0: none is live there.
  size_t nbytes_at(uint64_t address) const;

 private:
  mutable std::mutex mutex_;
  std::map<uint64_t, size_t> nbytes_;
};

}  // namespace moe_a2a
