// Both halves of a dispatch in one launch: the steps of DispatchSend and DispatchRecv, assigned to blocks as roles.
// Some blocks send while the others receive; a second launch would only start when the last sender has finished. In a
// small batch nearly all blocks do both, one after the other.
#pragma once

#include <algorithm>

#include "moe/dispatch/dispatch_recv.h"
#include "moe/dispatch/dispatch_send.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

struct Dispatch {
  using Args = DispatchArgs;
  static constexpr const char* kName = "dispatch";

  // For a small batch the receivers' num_tokens precede the senders' stages, since both are in use at once.
  static size_t shared_bytes(const Args& args) {
    return std::max(rows_begin(args) + DispatchSend::shared_bytes(args.send), DispatchRecv::shared_bytes(args.recv));
  }
  MOE_A2A_HOST_DEVICE static int rows_begin(const Args& args) {
    if (!DispatchSend::sends_ll_rows(args.send)) return 0;
    const MoeConfig& config = args.send.context.config;
    const int num_tokens = kBlockWarps * config.num_ranks;
    return SharedCarver::round_up(num_tokens * static_cast<int>(sizeof(int32_t)), SharedCarver::kLine);
  }

  // The grids of the blocks that send the routing, send the rows, and receive.
  struct Roles {
    Grid routing, rows, receivers;
    DispatchRecv::Roles receive;
  };
  template <class Batch>
  MOE_A2A_DEVICE static Roles roles(const Args& args, const Grid& grid) {
    constexpr bool kAllDoBoth = Batch::Wire::kIsLl;
    const int num_senders = kAllDoBoth ? 0 : args.num_send_blocks;
    const Grid receivers{grid.rank() - num_senders, grid.size() - num_senders};
    const DispatchRecv::Roles receive = DispatchRecv::roles(receivers);
    // Before other ranks' routing arrives there is nothing to receive, so the receivers send this rank's. A small
    // batch's rows leave before another rank's first words can arrive.
    if (kAllDoBoth) return {receive.rows, receive.rows, receivers, receive};
    return {receivers, Grid{grid.rank(), num_senders}, receivers, receive};
  }

  // Each kind of batch has its own copy of the receiver: with one copy after all senders, a small batch of 128 tokens
  // took 35.0 us instead of 30.2 (4 H200, float8).
  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte* shared) {
    DispatchSend::with_batch(args.send, [&](auto batch) MOE_A2A_INLINED {
      using Batch = typename decltype(batch)::type;
      const Context& c = args.send.context;
      const uint64_t epoch = c.region.epoch(args.send.buffer) + 1, start = trace_now();
      const Roles roles = Dispatch::roles<Batch>(args, grid);
      const bool sends = has_part_in(roles.rows), receives = has_part_in(roles.receivers);
      DispatchSend::prefetch_rows(batch, args.send, roles.rows, block);
      const bool has_credits = DispatchSend::await_credits(c, block, args.send.buffer, epoch, args.send.number,
                                                           Batch::Wire::kIsLl ? 0 : block.num_warps() - 1);
      const auto begin = [&]() MOE_A2A_INLINED {
        return DispatchSend::begin(args.send, grid, block, epoch, has_credits);
      };
      const auto send_rows = [&](const auto& begin) MOE_A2A_INLINED {
        return DispatchSend::send_rows(batch, args.send, roles.rows, block, shared + rows_begin(args), epoch, begin);
      };
      bool good = true;
      if (!Batch::Wire::kIsLl && sends) {
        good = send_rows(begin);  // the block sets up while its last warp waits for the credits
      } else {
        good = begin();
        if (good && has_part_in(roles.routing)) {
          DispatchSend::send_routing(batch, args.send, roles.routing, block, shared, epoch);
        }
        if constexpr (Batch::Wire::kIsLl) {
          if (good && sends) send_rows([] { return true; });
        }
        if (good && receives) {
          // The lists reuse the senders' shared memory.
          if (Batch::kHasTable || grid.size() == 1) block.sync();
          DispatchRecv::receive(args.recv, roles.receive, block, shared, epoch);
        }
      }
      if (!good) DispatchSend::make_void(args.send, grid, block);
      if (Batch::Wire::kIsLl) return;
      record_role(c, block.warp(), receives ? moe_op::kDispatchRecv : moe_op::kDispatchSend, start);
    });
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
