// The only way to the machine. A file is compiled for one target: CPU, CUDA or HIP; a test may supply its own.
//
// Every target provides the same names, each in its own inline namespace, so that two targets link into one program:
//
//   groups     Warp, Block, Grid: rank(), size(), sync(), release_sync(), any(), count(), broadcast(), last(),
//              inclusive_sum(), reduce_or(), matches(), max_of_neighbours(), largest_magnitude(),
//              is_closing_warp()
//   memory     atomic_load / atomic_store / atomic_add / atomic_claim with order and scope, multicast_bytes, prefetch,
//              load_lane / value_of / store_lane, load_values / store_values, warp_memory<T>(): a T per warp;
//              LlBits: the widest word that is accessed atomically; kPollOrder, kOneWarpPublishes,
//              kLaunchesRelease: what ordering costs
//   rows       PlainRowSender, make_warp_sender(): see row_sender.h. with_row_reader(), with_piece_sender(): see
//              streamed_sums.h
//   matrices   BlockTile: see block_tile.h. MOE_A2A_HAS_TILE_PIPELINE: see cuda_tile_pipeline.h
//   numbers    to_float(), from_float<T>(), to_float8(), larger(), sigmoid()
//   time       clock_now() in the target's ticks, pause(polls) between two polls of a wait
//   host       launch<Kernel>(), prepare<Kernel>(), Machine: the target's Device, see device.h
#pragma once

#if defined(MOE_A2A_TARGET_HEADER)
#include MOE_A2A_TARGET_HEADER
#elif defined(__HIP__)
#include "arch/hip.h"
#elif defined(__CUDACC__)
#include "arch/cuda.h"
#else
#include "arch/cpu.h"
#endif

namespace moe_a2a::inline MOE_A2A_TARGET {

// Warps of a block, in every kernel but the pipelined GEMM.
inline constexpr int kBlockWarps = kBlockThreads / kWarpSize;

}  // namespace moe_a2a::inline MOE_A2A_TARGET
