// The families of MoE kernels.
#pragma once

#include "comm/kernel_family.h"

MOE_A2A_DECLARE_FAMILY(dispatch_kernels)
MOE_A2A_DECLARE_FAMILY(local_kernels)
MOE_A2A_DECLARE_FAMILY(combine_kernels)
MOE_A2A_DECLARE_FAMILY(coded_combine_kernels)
MOE_A2A_DECLARE_FAMILY(product_combine_kernels)
MOE_A2A_DECLARE_FAMILY(simulated_experts_kernels)
MOE_A2A_DECLARE_FAMILY(link_floor_kernels)

namespace moe_a2a {

// Equal at every x86-64 level, so any level's will do.
#if defined(MOE_A2A_CPU_LEVELS)
int64_t max_quantized_row_bytes_cpu_v2(int64_t max_shared_bytes);
#define MOE_A2A_QUANTIZED_ROW_OF_CPU max_quantized_row_bytes_cpu_v2
#else
int64_t max_quantized_row_bytes_cpu(int64_t max_shared_bytes);
#define MOE_A2A_QUANTIZED_ROW_OF_CPU max_quantized_row_bytes_cpu
#endif
int64_t max_quantized_row_bytes_cuda(int64_t max_shared_bytes);
int64_t max_quantized_row_bytes_hip(int64_t max_shared_bytes);

// The longest float8 row that dispatch can quantise with this much shared memory per block.
inline int64_t max_quantized_row_bytes(const std::string& target, int64_t max_shared_bytes) {
  MOE_A2A_IF_CPU(if (target == "cpu") return MOE_A2A_QUANTIZED_ROW_OF_CPU(max_shared_bytes);)
  MOE_A2A_IF_CUDA(if (target == "cuda") return max_quantized_row_bytes_cuda(max_shared_bytes);)
  MOE_A2A_IF_HIP(if (target == "hip") return max_quantized_row_bytes_hip(max_shared_bytes);)
  throw std::logic_error("this build has no kernels for target \"" + target + "\"");
}

}  // namespace moe_a2a
