#include "arch/cpu_level.h"

#if defined(MOE_A2A_CPU_LEVELS)

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace moe_a2a {
namespace {

int find_level() {
  const char* named = std::getenv("MOE_A2A_CPU_LEVEL");
  const std::string most = named != nullptr && *named != '\0' ? named : "v4";
  if (most != "v2" && most != "v3" && most != "v4") {
    throw std::runtime_error("MOE_A2A_CPU_LEVEL=" + most + " is unknown; pass v2, v3 or v4");
  }
  __builtin_cpu_init();
  if (most >= "v4" && __builtin_cpu_supports("x86-64-v4")) return 4;
  if (most >= "v3" && __builtin_cpu_supports("x86-64-v3")) return 3;
  if (__builtin_cpu_supports("x86-64-v2")) return 2;
  throw std::runtime_error(
      "this CPU is older than x86-64-v2, the minimum for this wheel of moe_a2a; build one for "
      "this machine: pip install -C cmake.define.MOE_A2A_NATIVE=ON <source of moe_a2a>");
}

}  // namespace

int cpu_level() {
  static const int level = find_level();
  return level;
}

}  // namespace moe_a2a

#endif
