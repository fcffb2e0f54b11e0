// What the links can do: a step's rows and nothing else. No table, no signals, no lists, no waits. The floor that
// benchmarks compare dispatch and combine with.
#pragma once

#include "moe/wires.h"

namespace moe_a2a {

enum class PushBy : int { kWarpSender, kWarpStores, kBlockStores };

// Where a row goes: to these ranks (one bit each), into this rank's slot for `token`.
struct Push {
  uint64_t dst_ranks = 0;
  int64_t token = 0;
};

struct PushRowsArgs {
  Context context;
  int buffer = 0;
  int num_rows = 0;
  Rows x;
  int64_t row_bytes = 0;         // at most a slot's size
  const Push* pushes = nullptr;  // [num_rows]
  PushBy by = PushBy::kWarpSender;
};

}  // namespace moe_a2a

namespace moe_a2a::inline MOE_A2A_TARGET {

struct PushRows {
  using Args = PushRowsArgs;
  static constexpr const char* kName = "push_rows";

  struct Plan {
    int stage_bytes = 0;  // per warp
    int num_senders = 0;
    SharedPart<std::byte> stages;
    int bytes = 0;
  };
  MOE_A2A_HOST_DEVICE static Plan plan(const Args& args) {
    const int64_t wanted = warp_staging_bytes(args.row_bytes, StagedFor::kSending);
    const int most = args.context.max_shared_bytes;
    Plan plan;
    if (args.by == PushBy::kWarpSender && wanted <= most) plan.stage_bytes = static_cast<int>(wanted);
    plan.num_senders = warps_with_stage(plan.stage_bytes, most, kBlockWarps);
    SharedCarver carver;
    plan.stages = carver.take_lines(plan.stage_bytes * plan.num_senders);
    plan.bytes = carver.bytes();
    return plan;
  }
  static size_t shared_bytes(const Args& args) { return plan(args).bytes; }

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte* shared) {
    const Context& c = args.context;
    const auto slot_at = [&](const Delivery& delivery, int rank) {
      return c.heap.peer(rank, c.region.row.at(args.buffer, c.heap.rank, delivery.token));
    };
    const auto done = [](const Delivery&) {};
    if (args.by == PushBy::kBlockStores) {
      PlainRowSender<Block, Delivery, decltype(slot_at), decltype(done)> sender(block, slot_at, done, nullptr);
      return push(args, sender, grid.rank(), grid.size());
    }
    const Plan plan = PushRows::plan(args);
    if (block.warp_rank() >= plan.num_senders) return;
    const Warp warp = block.warp();
    const int first = grid.rank() + grid.size() * block.warp_rank(), stride = grid.size() * plan.num_senders;
    if (args.by == PushBy::kWarpStores) {
      PlainRowSender<Warp, Delivery, decltype(slot_at), decltype(done)> sender(warp, slot_at, done, nullptr);
      return push(args, sender, first, stride);
    }
    std::byte* stage = plan.stage_bytes > 0 ? plan.stages.in(shared) + block.warp_rank() * plan.stage_bytes : nullptr;
    auto sender = make_warp_sender<Delivery>(warp, slot_at, done, stage, args.row_bytes);
    push(args, sender, first, stride);
  }

  template <class Sender>
  MOE_A2A_DEVICE static void push(const Args& args, Sender& sender, int first, int stride) {
    const HeapView& heap = args.context.heap;
    for (int row = first; row < args.num_rows; row += stride) {
      const Push push = args.pushes[row];
      const Delivery delivery{RankSet{push.dst_ranks}, static_cast<int>(push.token),
                              (heap.rank + 1 + row) % heap.num_ranks};
      sender.send({.values = args.x[row], .num_value_bytes = args.row_bytes}, delivery);
    }
    sender.finish();
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
