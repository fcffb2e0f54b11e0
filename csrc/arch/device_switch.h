// How host code changes the thread's current GPU and restores it. The runtime's own function, given a GPU that this
// process does not use, makes a context there, which takes hundreds of MB of its memory. PyTorch's does not, and
// remembers the GPU instead. This layer does not know PyTorch; the bindings install its functions.
#pragma once

namespace moe_a2a {

struct DeviceSwitch {
  int (*exchange)(int device) = nullptr;  // returns the current one, and makes `device` current
  void (*restore)(int device) = nullptr;  // what exchange() returned; throws nothing
};

// Before any GPU is used.
void set_device_switch(const DeviceSwitch& functions);
// `own`: if none are installed.
const DeviceSwitch& device_switch(const DeviceSwitch& own);

}  // namespace moe_a2a
