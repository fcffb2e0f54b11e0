// Arguments of the grouped GEMM: out[i] = activation(x[row_index[i]] @ w[e].T) for the positions i of expert e.
#pragma once

#include <cstdint>

#include "arch/number.h"

namespace moe_a2a {

enum class Activation : int32_t {
  kNone,
  kSwiglu,  // w holds the gate's rows before the up projection's; silu(gate) * up
};

struct GroupedGemmArgs {
  const void* x = nullptr;  // [num_x_rows, depth], rows x_stride elements apart
  const int32_t* row_index =
      nullptr;  // [num_rows]: the row of x of each position, -1: zeros. Null: position i is row i
  const int32_t* expert_offsets = nullptr;  // [num_experts + 1]: the first position of each expert
  const void* w = nullptr;                  // [num_experts, num_columns (twice for kSwiglu), depth]
  void* out = nullptr;                      // [num_rows, num_columns]
  int32_t* next_unit = nullptr;             // must be zero; counts the units that clusters have drawn
  int64_t x_stride = 0;
  int32_t num_experts = 0, num_x_rows = 0, num_rows = 0, num_columns = 0, depth = 0;
  DType dtype = DType::kBfloat16;
  Activation activation = Activation::kNone;
};

}  // namespace moe_a2a
