// The SwiGLU experts of a handle, by kernels: two products and the combine of their rows, in one call.
#pragma once

#include "bindings/expert_weights.h"
#include "bindings/grouped_gemm_arguments.h"
#include "bindings/views.h"

namespace moe_a2a::bindings {

// See ExpertParallel.experts() in moe_a2a/expert_parallel.py.
struct ExpertsOptions {
  int64_t num_max_routes;
  bool fuses_combine;
  LineCodec codec;
  const std::optional<at::Tensor>& out;
};

// `type`: of the result. `place`: of the combine.
at::Tensor run_experts(ExpertParallel& ep, Views& views, DispatchHandle& handle, const ExpertWeights& weights,
                       const ExpertsOptions& options, at::ScalarType type, const LaunchPlace& place);

// The second product, which sends its rows itself, and the receiving half of the combine. `second`: its operands.
at::Tensor multiply_and_combine(ExpertParallel& ep, DispatchHandle& handle, const GroupedGemmTensors& second,
                                at::ScalarType type, const std::optional<at::Tensor>& out, const LaunchPlace& place);

}  // namespace moe_a2a::bindings
