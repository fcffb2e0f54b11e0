// Makes the Device of one target; compiled once per target by that target's compiler. Nothing here names a vendor.
#include "arch/arch.h"
#include "arch/device.h"

namespace moe_a2a {

std::unique_ptr<Device> MOE_A2A_JOIN(make_device_, MOE_A2A_TARGET)(int index);
std::unique_ptr<Device> MOE_A2A_JOIN(make_device_, MOE_A2A_TARGET)(int index) {
  return std::make_unique<Machine>(index);
}

}  // namespace moe_a2a
