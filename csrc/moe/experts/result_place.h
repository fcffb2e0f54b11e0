// What the multiplying warps of the pipelined GEMM store, and where, whatever the shape of their products.
#pragma once

#include "moe/experts/grouped_gemm_args.h"
#include "moe/experts/pipeline_memory.h"

#if defined(MOE_A2A_HAS_TILE_PIPELINE)

namespace moe_a2a::inline MOE_A2A_TARGET {

// The part of a tile that a warp stores.
struct ResultPlace {
  uint32_t memory;  // of the warp; see PipelineMemory::results()
  int expert, first_position, num_rows, first_column;
};

// Two results of products of T as 16-bit numbers in one word.
template <class T>
MOE_A2A_DEVICE uint32_t pack_results(const GroupedGemmArgs& args, float first, float second) {
  if constexpr (std::is_same_v<T, Float8>) {
    return args.out_dtype == DType::kFloat16 ? pack<Half>(first, second) : pack<Bfloat16>(first, second);
  } else {
    return pack<T>(first, second);
  }
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET

#endif
