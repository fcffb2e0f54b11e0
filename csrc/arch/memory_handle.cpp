#include "arch/memory_handle.h"

#include <fstream>
#include <functional>
#include <stdexcept>
#include <string>

namespace moe_a2a {

uint64_t this_machine_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return std::hash<std::string>{}(id);
}

void require_this_machine(const MemoryHandle& handle) {
  if (handle.machine_id == this_machine_id()) return;
  throw std::runtime_error(
      "a rank of the group is on another machine; pass a group whose ranks share this one (TwoLevelExpertParallel and "
      "TwoLevelCollectives join machines)");
}

void require_live(const MemoryHandle& handle, size_t nbytes) {
  if (nbytes == 0) throw std::runtime_error("a rank of this process has closed its heap already");
  if (nbytes == handle.nbytes) return;
  throw std::invalid_argument("a heap of this process has " + std::to_string(nbytes) + " bytes, expected " +
                              std::to_string(handle.nbytes));
}

}  // namespace moe_a2a
