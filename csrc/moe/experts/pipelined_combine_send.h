// The pipelined GEMM whose idle warps send. A second product gathers nothing, so each block's two gathering warps sum
// and send landed rows as soon as their terms are stored.
#pragma once

#include "moe/combine/combine_send_stored.h"
#include "moe/experts/pipelined_gemm.h"
#include "moe/experts/product_combine_send.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// Not with the recorder: the stages leave no shared memory for its cursors. A traced launch uses
// product_combine_send.h.
#if defined(MOE_A2A_HAS_TILE_PIPELINE) && !MOE_A2A_RECORDING

struct SumSender {
  using Args = CombineSendArgs;
  static constexpr bool kSends = true;

  MOE_A2A_DEVICE static void send(const Args& args, const StoredTiles& stored, int worker, int num_workers) {
    CombineSendStored::send_by_warp(args, stored, Warp{}, worker, num_workers);
  }
};

template <class T>
using PipelinedCombineSend = PipelinedGemm<T, false, false, SumSender>;

template <class T>
void prepare_pipelined_combine_send(const LaunchSite& site) {
  if (has_pipeline<PipelinedCombineSend<T>>(site)) prepare_pipeline<PipelinedCombineSend<T>>(site);
}

// False if this device or grid cannot run it.
template <class T>
bool launch_pipelined_combine_send(const LaunchSite& site, const ProductCombineSendArgs& args) {
  using Kernel = PipelinedCombineSend<T>;
  if (site.num_blocks < PairedTiles::kBlocks || !has_pipeline<Kernel>(site)) return false;
  typename Kernel::Args pipelined = pipelined_args<Kernel, 1, false>(args.product);
  pipelined.sender = args.send;
  launch_pipeline<Kernel>(site, pipelined);
  return true;
}

#else

template <class T>
void prepare_pipelined_combine_send(const LaunchSite&) {}
template <class T>
bool launch_pipelined_combine_send(const LaunchSite&, const ProductCombineSendArgs&) {
  return false;
}

#endif

}  // namespace moe_a2a::inline MOE_A2A_TARGET
