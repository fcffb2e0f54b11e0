#include "comm/thread_device.h"

#include <map>
#include <tuple>

#include "arch/process.h"

namespace moe_a2a {

Device& device_of_thread(const std::string& target, int index, KernelFamily (*family)(const std::string& target)) {
  thread_local std::map<std::tuple<std::string, int, KernelFamily (*)(const std::string&)>, OwnedByMaker<Device>>
      devices;
  OwnedByMaker<Device>& device = devices[{target, index, family}];
  if (!device || !device.get_deleter().maker.is_this_process()) {
    OwnedByMaker<Device> made(make_device(target, index).release());
    made->add(family(target));
    device = std::move(made);
  }
  return *device;
}

}  // namespace moe_a2a
