#include "moe/experts/run_grouped_gemm.h"

#include <algorithm>
#include <map>
#include <memory>

#include "arch/device.h"
#include "arch/process.h"
#include "comm/kernel_family.h"
#include "comm/traced.h"

MOE_A2A_DECLARE_FAMILY(grouped_gemm_kernels)

namespace moe_a2a {
namespace {

// A device with the kernels loaded. In a forked child the CPU target's threads are gone, so the device can neither run
// nor be destroyed there: it is leaked.
class LoadedDevice {
 public:
  LoadedDevice() = default;
  LoadedDevice(const LoadedDevice&) = delete;
  LoadedDevice& operator=(const LoadedDevice&) = delete;
  ~LoadedDevice() { leave_to_parent(); }

  Device& get(const std::string& target, int index) {
    leave_to_parent();
    if (!device_) {
      device_ = make_device(target, index);
      device_->add(grouped_gemm_kernels(target));
      maker_ = MakerProcess();
    }
    return *device_;
  }

 private:
  void leave_to_parent() {
    if (!maker_.is_this_process()) (void)device_.release();
  }

  MakerProcess maker_;  // the device
  std::unique_ptr<Device> device_;
};

// One per thread: a CPU device runs one launch at a time.
Device& device_of_thread(const std::string& target, int index) {
  thread_local std::map<std::pair<std::string, int>, LoadedDevice> devices;
  return devices[{target, index}].get(target, index);
}

}  // namespace

void clear(const GroupedGemmPlace& place, void* memory, size_t nbytes) {
  device_of_thread(place.target, place.device).clear_in_order(memory, nbytes, place.stream);
}

void run_grouped_gemm(const GroupedGemmPlace& place, const GroupedGemmArgs& args) {
  Device& device = device_of_thread(place.target, place.device);
  const int most = device.max_blocks();
  device.launch(args, trace_of(args).is_on(), place.num_blocks > 0 ? std::min(place.num_blocks, most) : most,
                place.stream);
}

}  // namespace moe_a2a
