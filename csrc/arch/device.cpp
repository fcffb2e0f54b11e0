#include "arch/device.h"

#include <algorithm>
#include <stdexcept>

namespace moe_a2a {

void Device::add(const KernelFamily& family) {
  for (size_t i = 0; i < family.traced.size(); ++i) {
    const Kernel kernel{family.traced[i], family.untraced[i]};
    const auto is_known = [&](const Kernel& known) { return known.traced.args == kernel.traced.args; };
    if (std::any_of(kernels_.begin(), kernels_.end(), is_known)) continue;
    kernel.traced.prepare(site_);
    kernel.untraced.prepare(site_);
    kernels_.push_back(kernel);
  }
}

const Device::Kernel& Device::find(ArgsId args) const {
  for (const Kernel& kernel : kernels_) {
    if (kernel.traced.args == args) return kernel;
  }
  throw std::logic_error("a kernel was launched whose family was not added to the device");
}

// Defined by target_device.cpp, which is compiled once per target.
std::unique_ptr<Device> make_device_cpu(int index);
std::unique_ptr<Device> make_device_cuda(int index);
std::unique_ptr<Device> make_device_hip(int index);

namespace {

struct Target {
  const char* name;
  std::unique_ptr<Device> (*make)(int index);
};
constexpr Target kTargets[] = {
    MOE_A2A_IF_CPU({"cpu", make_device_cpu}, )     //
    MOE_A2A_IF_CUDA({"cuda", make_device_cuda}, )  //
    MOE_A2A_IF_HIP({"hip", make_device_hip}, )     //
};

}  // namespace

std::vector<std::string> built_targets() {
  std::vector<std::string> targets;
  for (const Target& target : kTargets) targets.emplace_back(target.name);
  return targets;
}

std::unique_ptr<Device> make_device(const std::string& target, int index) {
  std::string built;
  for (const Target& known : kTargets) {
    if (target == known.name) return known.make(index);
    built += std::string(built.empty() ? "" : ", ") + known.name;
  }
  throw std::runtime_error("this build of moe_a2a has no target \"" + target + "\" (it has: " + built +
                           "); build it with MOE_A2A_TARGETS=\"cpu;" + target + "\"");
}

}  // namespace moe_a2a
