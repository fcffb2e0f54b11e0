#include "moe/experts/run_grouped_gemm.h"

#include <algorithm>
#include <map>
#include <utility>

#include "arch/device.h"
#include "arch/process.h"
#include "comm/kernel_family.h"
#include "comm/traced.h"

MOE_A2A_DECLARE_FAMILY(grouped_gemm_kernels)

namespace moe_a2a {
namespace {

// A device with the kernels loaded. One per thread, since a CPU device runs one launch at a time, and a new one in a
// forked child.
Device& device_of_thread(const std::string& target, int index) {
  thread_local std::map<std::pair<std::string, int>, OwnedByMaker<Device>> devices;
  OwnedByMaker<Device>& device = devices[{target, index}];
  if (!device || !device.get_deleter().maker.is_this_process()) {
    OwnedByMaker<Device> made(make_device(target, index).release());
    made->add(grouped_gemm_kernels(target));
    device = std::move(made);
  }
  return *device;
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
