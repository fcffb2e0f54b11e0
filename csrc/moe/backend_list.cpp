// Which targets this library was built with.
#include <stdexcept>

#include "moe/backend.h"

namespace moe_a2a {

// Each is defined by backend.cpp as compiled for that target.
std::unique_ptr<Backend> make_backend_cpu(int device);
std::unique_ptr<Backend> make_backend_cuda(int device);
std::unique_ptr<Backend> make_backend_hip(int device);

namespace {

struct Entry {
  const char* target;
  std::unique_ptr<Backend> (*make)(int device);
};
constexpr Entry kEntries[] = {
#if defined(MOE_A2A_WITH_CPU)
    {"cpu", make_backend_cpu},
#endif
#if defined(MOE_A2A_WITH_CUDA)
    {"cuda", make_backend_cuda},
#endif
#if defined(MOE_A2A_WITH_HIP)
    {"hip", make_backend_hip},
#endif
};

}  // namespace

std::vector<std::string> built_targets() {
  std::vector<std::string> targets;
  for (const Entry& entry : kEntries) targets.emplace_back(entry.target);
  return targets;
}

std::unique_ptr<Backend> make_backend(const std::string& target, int device) {
  std::string built;
  for (const Entry& entry : kEntries) {
    if (target == entry.target) return entry.make(device);
    built += std::string(built.empty() ? "" : ", ") + entry.target;
  }
  throw std::runtime_error("this build of moe_a2a has no target \"" + target + "\" (it has: " + built +
                           "); build it with MOE_A2A_TARGETS=\"cpu;" + target + "\"");
}

}  // namespace moe_a2a
