// The experts of a handle, by kernels. SwiGLU: two products and the combine of their rows, in one call. Simulated:
// scaled rows. Of experts that PyTorch runs: the gradients of their weighted outputs.
#pragma once

#include "bindings/expert_weights.h"
#include "bindings/grouped_gemm_arguments.h"
#include "bindings/tensors.h"
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
at::Tensor run_product_combine(ExpertParallel& ep, DispatchHandle& handle, const GroupedGemmTensors& second,
                               at::ScalarType type, const std::optional<at::Tensor>& out, const LaunchPlace& place);

// See simulated_experts() and simulated_layer() in moe_a2a/experts.py. scales: of the local experts; none: `factor` for
// all.
struct SimulatedScales {
  const std::optional<at::Tensor>& scales;
  double factor;
};
at::Tensor run_simulated_experts(ExpertParallel& ep, const DispatchHandle& handle, at::Device device,
                                 at::ScalarType type, const SimulatedScales& scales, const LaunchPlace& place);
at::Tensor run_simulated_layer(ExpertParallel& ep, at::Device device, at::ScalarType type,
                               const DispatchTensors& tensors, const SimulatedScales& scales, const LaunchPlace& place);

// The gradients of combine's `y` and of its weights (float32, one per row of y), from a dispatch of the gradients of
// its sums.
std::pair<at::Tensor, at::Tensor> run_weighted_grads(ExpertParallel& ep, const DispatchHandle& handle,
                                                     const at::Tensor& y, const at::Tensor& weights,
                                                     const LaunchPlace& place);

}  // namespace moe_a2a::bindings
