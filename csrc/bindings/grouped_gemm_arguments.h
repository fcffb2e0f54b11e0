// The arguments of a grouped GEMM, and the errors for those that do not fit.
#pragma once

#include <optional>
#include <string>

#include "bindings/python.h"
#include "bindings/tensor_gate.h"
#include "moe/experts/grouped_gemm_args.h"

namespace moe_a2a::bindings {

// As Python passes it; see moe_a2a/grouped_gemm.py.
struct Epilogue {
  const std::optional<std::string>& activation;
  bool gated, interleaved;
  double alpha;
  std::optional<double> limit;
  double up_shift;
};

struct GroupedGemmTensors {
  const at::Tensor& x;
  const std::optional<at::Tensor>& row_index;
  const at::Tensor &expert_offsets, &w;
  const std::optional<at::Tensor>&bias, &x_scales, &w_scales;

  int64_t num_rows() const { return row_index ? row_index->size(0) : x.size(0); }
};

// Both raise TypeError or ValueError with value, limit and argument.
Activation to_activation(const Epilogue& epilogue);
void check_arguments(const Place& place, const GroupedGemmTensors& tensors, const Activation& activation,
                     at::ScalarType out_type);

}  // namespace moe_a2a::bindings
