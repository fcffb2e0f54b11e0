#include "arch/memory_handle.h"

#include <fstream>
#include <functional>
#include <string>

namespace moe_a2a {

uint64_t this_machine_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return std::hash<std::string>{}(id);
}

}  // namespace moe_a2a
