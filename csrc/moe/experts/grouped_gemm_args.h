// Arguments of the grouped GEMM. For each position i of expert e:
// out[i] = activation(x[row_index[i]] @ w[e].T + bias[e]).
#pragma once

#include <cstdint>
#include <limits>

#include "arch/attributes.h"
#include "arch/number.h"
#include "comm/trace_buffer.h"

namespace moe_a2a {

// What is applied to the fp32 sums: f(sum), or f(gate) * (up + up_shift) if w has rows of a gate and an up projection.
struct Activation {
  enum class Function : int32_t {
    kNone,
    kSilu,      // x * sigmoid(alpha * x)
    kGelu,      // with the error function
    kGeluTanh,  // its approximation by tanh
    kRelu2,     // relu(x) squared
  };
  Function function = Function::kNone;
  bool is_gated = false;
  bool is_interleaved = false;  // the gate's rows are the even ones of w; else they come before all of up's
  float alpha = 1;
  float limit = std::numeric_limits<float>::infinity();  // clamps the gate from above and up on both sides, before f
  float up_shift = 0;

  // The identity, or silu(gate) * up, which most models use.
  MOE_A2A_HOST_DEVICE bool is_plain() const {
    const bool is_unlimited = limit == std::numeric_limits<float>::infinity();
    return function == (is_gated ? Function::kSilu : Function::kNone) && alpha == 1 && is_unlimited && up_shift == 0;
  }
};

struct GroupedGemmArgs {
  const void* x = nullptr;  // [num_x_rows, depth], rows x_stride elements apart
  // [num_rows]: the row of x of each position, -1: zeros. Null: position i is row i
  const int32_t* row_index = nullptr;
  const int32_t* expert_offsets = nullptr;  // [num_experts + 1]: the first position of each expert
  const void* w = nullptr;                  // [num_experts, rows_of_w(), depth]
  const float* bias = nullptr;              // [num_experts, rows_of_w()]: added to the sums. Null: none
  void* out = nullptr;                      // [num_rows, num_columns]
  // With float8 x and w, one scale per 128 of depth: for x per row, for w per 128 rows, gate and up separate.
  const float* x_scales = nullptr;   // [num_x_rows, num_scales()], rows x_scales_stride elements apart
  const float* w_scales = nullptr;   // [num_experts, row_blocks_of_w(), num_scales()]
  float* out_scales = nullptr;       // [num_rows, column_blocks()]: of float8 results
  int32_t* next_unit = nullptr;      // must be zero; counts the units that clusters have drawn
  uint32_t* stored_tiles = nullptr;  // [num_rows], must be zero; see stored_tiles.h. Null: nobody waits for rows
  int64_t x_stride = 0, x_scales_stride = 0;
  int32_t num_experts = 0, num_x_rows = 0, num_rows = 0, num_columns = 0, depth = 0;
  DType dtype = DType::kBfloat16, out_dtype = DType::kBfloat16;  // they differ with float8 only
  // The launch before on the stream is the product whose results are x; nothing else of this one depends on it. So this
  // one may begin while that one ends, where target and kernels allow it.
  bool follows_product = false;
  Activation activation;
  TraceBuffer trace;  // where the tiles are recorded

  MOE_A2A_HOST_DEVICE int num_scales() const { return (depth + 127) / 128; }
  MOE_A2A_HOST_DEVICE int column_blocks() const { return (num_columns + 127) / 128; }
  MOE_A2A_HOST_DEVICE int row_blocks_of_w() const { return column_blocks() * (activation.is_gated ? 2 : 1); }
  // A half's scales of the 128 columns from `column` on; past the end, those of the last block of columns.
  MOE_A2A_HOST_DEVICE const float* scales_of_w(int expert, int half, int column) const {
    const int block = column < num_columns ? column / 128 : column_blocks() - 1;
    return w_scales + (int64_t{expert} * row_blocks_of_w() + half * column_blocks() + block) * num_scales();
  }
  // Per expert: two per column if gated.
  MOE_A2A_HOST_DEVICE int64_t rows_of_w() const { return int64_t{num_columns} * (activation.is_gated ? 2 : 1); }
  // The row of an expert's w that yields this column. half: 1 for up.
  MOE_A2A_HOST_DEVICE int64_t row_of_w(int half, int column) const {
    return activation.is_interleaved ? int64_t{2} * column + half : int64_t{half} * num_columns + column;
  }
};

}  // namespace moe_a2a
