#include "moe/experts/run_grouped_gemm.h"

#include <algorithm>

#include "comm/thread_device.h"
#include "comm/traced.h"

MOE_A2A_DECLARE_FAMILY(grouped_gemm_kernels)

namespace moe_a2a {
void clear(const GroupedGemmPlace& place, void* memory, size_t nbytes) {
  device_of_thread(place.target, place.device, grouped_gemm_kernels).clear_in_order(memory, nbytes, place.stream);
}

void run_grouped_gemm(const GroupedGemmPlace& place, const GroupedGemmArgs& args) {
  Device& device = device_of_thread(place.target, place.device, grouped_gemm_kernels);
  const int most = device.max_blocks();
  device.launch(args, trace_of(args).is_on(), place.num_blocks > 0 ? std::min(place.num_blocks, most) : most,
                place.stream);
}

}  // namespace moe_a2a
