// What the links can do: the rows of a step and nothing else. No table, no signals, no lists, nobody waits. Benchmarks
// hold dispatch and combine against it.
#pragma once

#include "rows/row.h"

namespace moe_a2a {

// How a row is pushed.
enum class PushBy : int { kWarpSender, kWarpStores, kBlockStores };

// Where a row goes: to these ranks (a bit each), as this rank's row of that token.
struct Push {
  uint64_t members = 0;
  int64_t token = 0;
};

struct PushRowsArgs {
  Context context;
  int buffer = 0;
  int num_rows = 0;
  Rows x;
  int64_t row_bytes = 0;         // at most a row's place in the heap
  const Push* pushes = nullptr;  // [num_rows]
  PushBy by = PushBy::kWarpSender;
};

}  // namespace moe_a2a

namespace moe_a2a::inline MOE_A2A_TARGET {

struct PushRows {
  using Args = PushRowsArgs;
  static constexpr const char* kName = "push_rows";

  MOE_A2A_HOST_DEVICE static int64_t staging_bytes(const Args& args) {
    if (args.by != PushBy::kWarpSender) return 0;
    return staging_that_fits(args.context, warp_staging_bytes(args.row_bytes, StagedFor::kSending));
  }
  // Warps of a block that push: as many as there is staging for.
  MOE_A2A_HOST_DEVICE static int num_senders(const Args& args) {
    return warps_with_staging(args.context, staging_bytes(args));
  }
  static size_t shared_bytes(const Args& args) { return staging_bytes(args) * num_senders(args); }

  struct Item {
    RankSet members;
    int64_t token = 0;
    int turn = 0;
  };

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte* shared) {
    const Context& c = args.context;
    const auto landing_at = [&](const Item& item, int rank) {
      return c.heap.peer(rank, c.ws.row.at(args.buffer, c.heap.rank, item.token));
    };
    const auto done = [](const Item&) {};
    if (args.by == PushBy::kBlockStores) {
      PlainRowSender<Block, Item, decltype(landing_at), decltype(done)> sender(block, landing_at, done, nullptr);
      return push(args, sender, grid.rank(), grid.size());
    }
    const int senders = num_senders(args);
    if (block.warp_rank() >= senders) return;
    const Warp warp = block.warp();
    const int first = grid.rank() + grid.size() * block.warp_rank(), stride = grid.size() * senders;
    if (args.by == PushBy::kWarpStores) {
      PlainRowSender<Warp, Item, decltype(landing_at), decltype(done)> sender(warp, landing_at, done, nullptr);
      return push(args, sender, first, stride);
    }
    std::byte* staging = staging_bytes(args) > 0 ? shared + block.warp_rank() * staging_bytes(args) : nullptr;
    auto sender = make_warp_sender<Item>(warp, landing_at, done, staging, args.row_bytes);
    push(args, sender, first, stride);
  }

  template <class Sender>
  MOE_A2A_DEVICE static void push(const Args& args, Sender& sender, int first, int stride) {
    const HeapView& heap = args.context.heap;
    for (int row = first; row < args.num_rows; row += stride) {
      const Push push = args.pushes[row];
      const Item item{RankSet{push.members}, push.token, (heap.rank + 1 + row) % heap.num_ranks};
      sender.send({.values = args.x[row], .num_value_bytes = args.row_bytes}, item);
    }
    sender.finish();
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
