// Two-shot all-reduce, and its two shots alone: reduce-scatter and all-gather. Moves 2 (R - 1) / R times the bytes of
// the tensor over each link direction: for large tensors. All ranks get the same bits.
#pragma once

#include <limits>

#include "collectives/coded_steps.h"

namespace moe_a2a {

struct TwoShotArgs : ShareArgs {};
// One chunk per block, however large: another fence costs more than sending ahead gains. us with at most four chunks
// per block, two, and one, 2 H100, 64 MiB: fp8 143, 139, 140, q4 110, 103, 100; 128 MiB: fp8 289, 279, 280, q4 222,
// 208, 199.
template <LineCodec kCodec>
struct CodedTwoShotArgs : ShareArgs {
  static constexpr int kLargeChunk = std::numeric_limits<int>::max();
};
struct ReduceScatterArgs : ShareArgs {
  static constexpr int kLargeChunk = kLargeChunkBytesOfHalves;
};
struct AllGatherArgs : ShareArgs {
  static constexpr int kLargeChunk = kLargeChunkBytesOfHalves;
};

}  // namespace moe_a2a

namespace moe_a2a::inline MOE_A2A_TARGET {

struct TwoShot {
  using Args = TwoShotArgs;
  static constexpr const char* kName = "two_shot_all_reduce";

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte*) {
    run_pipeline<ShareSteps, &ShareSteps::push, &ShareSteps::reduce_for_all, &ShareSteps::pull>(
        args, collective_op::kTwoShot, grid, block);
  }
};

// One kernel per codec, so that each allocates only the registers it needs.
template <LineCodec kCodec>
struct CodedTwoShot {
  using Args = CodedTwoShotArgs<kCodec>;
  static constexpr const char* kName = "two_shot_all_reduce";

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte*) {
    using Steps = CodedSteps<kCodec>;
    run_pipeline<Steps, &Steps::push, &Steps::reduce, &Steps::take>(args, collective_op::kTwoShot, grid, block);
  }
};

struct ReduceScatter {
  using Args = ReduceScatterArgs;
  static constexpr const char* kName = "reduce_scatter";

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte*) {
    run_pipeline<ShareSteps, &ShareSteps::push, &ShareSteps::reduce>(args, collective_op::kReduceScatter, grid, block);
  }
};

struct AllGather {
  using Args = AllGatherArgs;
  static constexpr const char* kName = "all_gather";

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte*) {
    run_pipeline<GatherSteps, &GatherSteps::give, &GatherSteps::take>(args, collective_op::kAllGather, grid, block);
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
