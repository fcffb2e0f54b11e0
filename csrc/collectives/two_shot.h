// Two-shot all-reduce, and its two shots by themselves: reduce-scatter and all-gather. 2 (R - 1) / R times the bytes of
// the message over each link direction, whatever R is: for large messages. All ranks get the same bits.
#pragma once

#include "collectives/coded_steps.h"

namespace moe_a2a {

struct TwoShotArgs : ShareArgs {};
template <LineCodec kCodec>
struct CodedTwoShotArgs : ShareArgs {};
struct ReduceScatterArgs : ShareArgs {};
struct AllGatherArgs : ShareArgs {};

}  // namespace moe_a2a

namespace moe_a2a::inline MOE_A2A_TARGET {

struct TwoShot {
  using Args = TwoShotArgs;
  static constexpr const char* kName = "two_shot_all_reduce";

  static size_t shared_bytes(const Args&) { return 0; }

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte*) {
    const auto steps = [&](const Part& part) { return ShareSteps(args, part, grid, block); };
    take_part(
        args, collective_op::kTwoShot, grid, block, [&](const Part& part) { steps(part).send_contributions(); },
        [&](const Part& part) { return steps(part).reduce(true) && steps(part).pull(); });
  }
};

// A kernel per codec, each with the registers that it needs.
template <LineCodec kCodec>
struct CodedTwoShot {
  using Args = CodedTwoShotArgs<kCodec>;
  static constexpr const char* kName = "two_shot_all_reduce";

  static size_t shared_bytes(const Args&) { return 0; }

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte*) {
    const auto steps = [&](const Part& part) { return CodedSteps<kCodec>(args, part, grid, block); };
    take_part(
        args, collective_op::kTwoShot, grid, block, [&](const Part& part) { steps(part).send_contributions(); },
        [&](const Part& part) { return steps(part).reduce() && steps(part).pull(); });
  }
};

struct ReduceScatter {
  using Args = ReduceScatterArgs;
  static constexpr const char* kName = "reduce_scatter";

  static size_t shared_bytes(const Args&) { return 0; }

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte*) {
    const auto steps = [&](const Part& part) { return ShareSteps(args, part, grid, block); };
    take_part(
        args, collective_op::kReduceScatter, grid, block, [&](const Part& part) { steps(part).send_contributions(); },
        [&](const Part& part) { return steps(part).reduce(false); });
  }
};

struct AllGather {
  using Args = AllGatherArgs;
  static constexpr const char* kName = "all_gather";

  static size_t shared_bytes(const Args&) { return 0; }

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte*) {
    const auto steps = [&](const Part& part) { return ShareSteps(args, part, grid, block); };
    take_part(
        args, collective_op::kAllGather, grid, block, [&](const Part& part) { steps(part).show_own(); },
        [&](const Part& part) { return steps(part).pull(); });
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
