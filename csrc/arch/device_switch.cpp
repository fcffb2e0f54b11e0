#include "arch/device_switch.h"

namespace moe_a2a {
namespace {

DeviceSwitch installed;

}  // namespace

void set_device_switch(const DeviceSwitch& functions) { installed = functions; }

const DeviceSwitch& device_switch(const DeviceSwitch& own) { return installed.exchange != nullptr ? installed : own; }

}  // namespace moe_a2a
