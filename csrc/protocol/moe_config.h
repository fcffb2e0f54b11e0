// The sizes that all ranks agree on when an ExpertParallel is made.
#pragma once

#include <cstdint>
#include <string>

#include "symmetric_memory/heap_view.h"
#include "target/number.h"

namespace moe_a2a {

// The payload of a signal holds a number of tokens (signal.h), one value of it means "refused".
inline constexpr int kMaxTokensPerRank = (1 << 20) - 2;
// Length of the values that share one scale in a float8 row.
inline constexpr int kScaleBlock = 128;

struct MoeConfig {
  int rank = 0;
  int num_ranks = 1;
  int num_experts = 0;
  int num_topk = 0;
  int hidden = 0;
  int num_max_tokens_per_rank = 0;
  int num_buffers = 2;
  DType dtype = DType::kBfloat16;

  MOE_A2A_HOST_DEVICE constexpr int num_local_experts() const { return num_experts / num_ranks; }
  MOE_A2A_HOST_DEVICE constexpr int num_scales() const { return (hidden + kScaleBlock - 1) / kScaleBlock; }
  // Routes that can arrive here: every token of every rank may bring all of its choices.
  MOE_A2A_HOST_DEVICE constexpr int64_t route_capacity() const {
    return static_cast<int64_t>(num_ranks) * num_max_tokens_per_rank * num_topk;
  }
  MOE_A2A_HOST_DEVICE constexpr int64_t row_capacity() const {
    return static_cast<int64_t>(num_ranks) * num_max_tokens_per_rank;
  }

  // Where the scales start inside a float8 row.
  MOE_A2A_HOST_DEVICE constexpr int64_t scales_offset() const { return (hidden + 15) / 16 * 16; }
  // Bytes that travel for one row.
  MOE_A2A_HOST_DEVICE constexpr int64_t row_bytes(DType row_dtype) const {
    return row_dtype == DType::kFloat8 ? scales_offset() + int64_t{4} * num_scales()
                                       : static_cast<int64_t>(hidden) * size_of(row_dtype);
  }
  // Bytes from one row of the heap to the next: rows start on 128-byte lines (8 % of the link, measured on H200).
  MOE_A2A_HOST_DEVICE constexpr int64_t row_stride(DType row_dtype) const {
    return (row_bytes(row_dtype) + 127) / 128 * 128;
  }
  MOE_A2A_HOST_DEVICE constexpr int64_t max_row_stride() const {
    const int64_t own = row_stride(dtype), quantized = row_stride(DType::kFloat8);
    return own > quantized ? own : quantized;
  }

  // The first rule that does not hold, in words that name value, limit and argument; empty when all hold.
  std::string violation() const;
};

}  // namespace moe_a2a
