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

// Each block pushes all of its chunks, then reduces, then takes: usually one, see kLargeChunk. A loop per step, since
// the values of a codec fill the registers: in the one loop of run_pipeline() 332 bytes spilled, and a call of 64 MiB
// took 137 us (fp8) and 95 (q4) instead of 127 and 86 (2 H200). One kernel per codec, so that each allocates only the
// registers it needs.
template <LineCodec kCodec>
struct CodedTwoShot {
  using Args = CodedTwoShotArgs<kCodec>;
  static constexpr const char* kName = "two_shot_all_reduce";

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte*) {
    const int num_chunks = args.extent.most_chunks;
    const auto send = [&](const Part& part) {
      const CodedSteps<kCodec> steps(args, part, grid, block);
      steps.for_chunks(num_chunks, [&](int i) {
        steps.push(i);
        signal_chunks(part, block, i, steps.receivers_of(i), kNoChunk, {});
        return true;
      });
    };
    const auto receive = [&](const Part& part) {
      if (grid.rank() >= num_chunks) return meet(part, grid, block);
      const CodedSteps<kCodec> steps(args, part, grid, block);
      const auto reduce = [&](int i) {
        if (!wait_for_chunks(part, grid, block, i, steps.senders_of(i), kNoChunk, {})) return false;
        steps.reduce(i);
        const RankSet others = steps.others_with_own(i);
        signal_chunks(part, block, kNoChunk, {}, others.empty() ? kNoChunk : i, others);
        return true;
      };
      const auto take = [&](int i) {
        if (!wait_for_chunks(part, grid, block, kNoChunk, {}, i, steps.owners_of(i))) return false;
        steps.take(i);
        return true;
      };
      return steps.for_chunks(num_chunks, reduce) && steps.for_chunks(num_chunks, take);
    };
    take_part(args, collective_op::kTwoShot, grid, block, send, receive);
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
