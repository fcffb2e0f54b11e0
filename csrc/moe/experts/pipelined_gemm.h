// Launches the pipelined GEMM (pipelined_kernel.h) where target and device have it.
#pragma once

#include "moe/experts/pipelined_kernel.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

#if defined(MOE_A2A_HAS_TILE_PIPELINE)

template <class T, bool kGated>
void prepare_pipelined_gemm(const LaunchSite& site) {
  if (!has_pipeline<PipelinedGemm<T, kGated, true>>(site)) return;
  prepare_pipeline<PipelinedGemm<T, kGated, true>>(site);
  prepare_pipeline<PipelinedGemm<T, kGated, false>>(site);
}

// kHalves: 2 if gated.
template <class Kernel, int kHalves, bool kGathers>
typename Kernel::Args pipelined_args(const GroupedGemmArgs& args) {
  using Memory = PipelineMemory;
  const int64_t depth = args.depth, columns = args.num_columns;
  const int64_t next_column = args.row_of_w(0, 1) * depth, next_half = args.row_of_w(1, 0) * depth;
  typename Kernel::Args pipelined = {.gemm = args,
                                     .w = make_tensor_map({args.w,
                                                           args.dtype,
                                                           {{depth, 1, Kernel::kTileDepth},
                                                            {columns, next_column, Memory::kHalfColumns},
                                                            {kHalves, next_half, 1},
                                                            {args.num_experts, kHalves * columns * depth, 1}}}),
                                     .x = {},
                                     .few_x = {},
                                     .sender = {}};
  if (!kGathers) {
    const auto rows_of_x = [&](uint32_t box) {
      return make_tensor_map(
          {args.x, args.dtype, {{depth, 1, Kernel::kTileDepth}, {args.num_x_rows, args.x_stride, box}}});
    };
    pipelined.x = rows_of_x(Memory::kTileRows);
    pipelined.few_x = rows_of_x(Memory::kFewRows);
  }
  return pipelined;
}

template <class T, bool kGated, bool kGathers>
void launch_pipelined_gemm_of(const LaunchSite& site, const GroupedGemmArgs& args) {
  using Kernel = PipelinedGemm<T, kGated, kGathers>;
  const bool begins_early = !kGathers && args.follows_product;  // gathered rows do not wait_for_last_launch()
  launch_pipeline<Kernel>(site, pipelined_args<Kernel, kGated ? 2 : 1, kGathers>(args), begins_early);
}

// False if this device or grid cannot run it.
template <class T, bool kGated>
bool launch_pipelined_gemm(const LaunchSite& site, const GroupedGemmArgs& args) {
  if (site.num_blocks < PairedTiles::kBlocks || !has_pipeline<PipelinedGemm<T, kGated, true>>(site)) return false;
  if (args.row_index != nullptr) {
    launch_pipelined_gemm_of<T, kGated, true>(site, args);
  } else {
    launch_pipelined_gemm_of<T, kGated, false>(site, args);
  }
  return true;
}

#else

template <class T, bool kGated>
void prepare_pipelined_gemm(const LaunchSite&) {}
template <class T, bool kGated>
bool launch_pipelined_gemm(const LaunchSite&, const GroupedGemmArgs&) {
  return false;
}

#endif

}  // namespace moe_a2a::inline MOE_A2A_TARGET
