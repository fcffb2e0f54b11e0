// moe_a2a.grouped_gemm(), and what it shares with the product that sends its rows (bindings.cpp).
#pragma once

#include <memory>

#include "bindings/grouped_gemm_arguments.h"
#include "moe/expert_parallel.h"

namespace moe_a2a::bindings {

// A checked product: its result, and what the kernel gets. Holds the memory that the kernel needs until it is launched.
struct PreparedProduct {
  at::Tensor out;
  std::optional<at::Tensor> out_scales;  // of a float8 out
  at::Tensor counters;                   // zeros: args.next_unit, then args.stored_tiles
  GroupedGemmArgs args;
};
PreparedProduct prepare_product(const GroupedGemmTensors& tensors, const Activation& activation,
                                at::ScalarType out_type, bool counts_tiles);

// An ExpertParallel whose trace is on. Its products are those whose expert_offsets lie in its memory.
struct TracedExperts {
  std::shared_ptr<ExpertParallel> ep;
};

void register_grouped_gemm(py::module_& m);

}  // namespace moe_a2a::bindings
