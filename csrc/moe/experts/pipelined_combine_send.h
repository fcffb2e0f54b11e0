// The pipelined GEMM and the combine_send of its rows: the last blocks form and send the sums of landed rows as soon as
// their terms are stored; the others multiply, then join them.
#pragma once

#include "moe/combine/combine_send_stored.h"
#include "moe/experts/pipelined_gemm.h"
#include "moe/experts/product_combine_send.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// Not with the recorder: the stages leave no shared memory for its cursors. A traced launch uses
// product_combine_send.h.
#if defined(MOE_A2A_HAS_TILE_PIPELINE) && !MOE_A2A_RECORDING

struct SumSender {
  struct Args {
    CombineSendArgs send;
    int num_blocks;  // that only send: the last ones of the grid
  };
  static constexpr bool kSends = true;

  MOE_A2A_DEVICE static bool only_sends(const Args& args) {
    return block_in_grid() >= blocks_in_grid() - args.num_blocks;
  }

  template <int kThreads>
  MOE_A2A_DEVICE static void send(const Args& args, const StoredTiles& stored, std::byte* shared) {
    constexpr int kScratchBytes = 128;  // in front, since a static variable beside the stages would not fit
    const Block block(*reinterpret_cast<Block::Scratch*>(shared), kThreads);
    CombineSendStored::send(args.send, stored, Grid{block_in_grid(), blocks_in_grid()}, block, shared + kScratchBytes);
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
  const int num_senders = (args.num_send_blocks + 1) / PairedTiles::kBlocks * PairedTiles::kBlocks;  // whole clusters
  if (site.num_blocks < num_senders + PairedTiles::kBlocks || !has_pipeline<Kernel>(site)) return false;
  typename Kernel::Args pipelined = pipelined_args<Kernel, 1, false>(args.product);
  pipelined.sender = {args.send, num_senders};
  launch_pipeline<Kernel>(site, pipelined, args.product.follows_product);
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
