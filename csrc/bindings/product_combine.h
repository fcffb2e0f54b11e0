// The second product of an expert layer, which sends its rows itself, and the receiving half of the combine.
#pragma once

#include "bindings/grouped_gemm_arguments.h"
#include "moe/expert_parallel.h"

namespace moe_a2a::bindings {

// `second`: the product's operands. `place`: of the receiving half.
at::Tensor multiply_and_combine(ExpertParallel& ep, DispatchHandle& handle, const GroupedGemmTensors& second,
                                at::ScalarType type, const std::optional<at::Tensor>& out, const LaunchPlace& place);

}  // namespace moe_a2a::bindings
