// moe_a2a.grouped_gemm(), and what it shares with the product that sends its rows (experts.cpp).
#pragma once

#include <memory>

#include "bindings/grouped_gemm_arguments.h"
#include "moe/expert_parallel.h"
#include "moe/experts/run_grouped_gemm.h"

namespace moe_a2a::bindings {

// A checked product: its result, and the kernel's arguments without the counters.
struct PreparedProduct {
  at::Tensor out;
  std::optional<at::Tensor> out_scales;  // of a float8 out
  GroupedGemmArgs args;
};
PreparedProduct prepare_product(const GroupedGemmTensors& tensors, const Activation& activation,
                                at::ScalarType out_type);

// Where products of tensors on `device` run. num_blocks 0: on a GPU every block, on the CPU PyTorch's threads.
GroupedGemmPlace product_place(const std::string& target, const at::Device& device, int num_blocks, void* stream);
// Zeroed counters for products there, in the order of the stream. Keep the tensor until the products are launched.
at::Tensor zeroed_counters(const GroupedGemmPlace& place, const at::Device& device, int64_t num);

// An ExpertParallel whose trace is on. Its products are those whose expert_offsets lie in its memory.
struct TracedExperts {
  std::shared_ptr<ExpertParallel> ep;
};

void bind_grouped_gemm(py::module_& m);

}  // namespace moe_a2a::bindings
