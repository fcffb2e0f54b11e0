// Both halves of a call in one launch, as roles: the first blocks send, the others receive at the same time. For calls
// with nothing in between, where a second launch would only start when the last sender has ended.
#pragma once

#include <algorithm>

#include "moe/combine/combine_recv.h"
#include "moe/combine/combine_send.h"
#include "moe/dispatch/dispatch_recv.h"
#include "moe/dispatch/dispatch_send.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// A block's part of the launch, on the track of each of its warps. Of a small batch all blocks have the same.
MOE_A2A_DEVICE void record_role(const Context& c, const Block& block, Operation role, uint64_t start) {
  record(c.trace(), block.warp(), {.kind = TraceKind::kKernel, .begin = start, .token = static_cast<int>(role)});
}

struct Dispatch {
  using Args = DispatchArgs;
  static constexpr const char* kName = "dispatch";

  // The senders of a small batch work beside the receivers of their block.
  static size_t shared_bytes(const Args& args) {
    const size_t beside = DispatchSend::sends_ll(args.send) ? DispatchRecv::header_bytes(args.send.context.config) : 0;
    return std::max(beside + DispatchSend::shared_bytes(args.send), DispatchRecv::shared_bytes(args.recv));
  }

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte* shared) {
    const Context& c = args.send.context;
    const uint64_t epoch = c.ws.epoch(args.send.buffer) + 1, start = trace_now();
    const bool small = DispatchSend::sends_ll(args.send);
    const int senders = small ? 0 : args.num_send_blocks;
    const bool is_receiver = grid.rank() >= senders;
    const Grid receivers{grid.rank() - senders, grid.size() - senders};
    const DispatchRecv::Shares shares = DispatchRecv::shares(receivers);
    if (small && shares.sees_rows()) DispatchSend::prefetch_first_unit(args.send, shares.rows, block);
    const bool good = DispatchSend::wait_for_credits(c, block, args.send.buffer, epoch);
    if (small) DispatchSend::advance_epoch_early(c, args.send.buffer, grid, block, epoch);  // all threads have read it
    if (good && !small) {
      send(args, is_receiver, Grid{grid.rank(), senders}, receivers, block, shared, epoch);
    } else if (good && shares.sees_rows()) {  // it is on its way before the first words of another rank can be here
      DispatchSend::send_small_batch(args.send, shares.rows, block, shared + DispatchRecv::header_bytes(c.config),
                                     epoch);
    }
    if (good && is_receiver) {
      if (!small || grid.size() == 1) block.sync();  // the memory of who sent before is the lists' now
      DispatchRecv::receive(args.recv, shares, block, shared, epoch);
    }
    if (small) return;
    record_role(c, block, is_receiver ? moe_op::kDispatchRecv : moe_op::kDispatchSend, start);
    DispatchSend::advance_epoch(c, args.send.buffer, grid, block, epoch);
  }

  // Before tables come there is nothing to receive, so the receivers send this rank's.
  MOE_A2A_DEVICE static void send(const Args& args, bool is_receiver, const Grid& senders, const Grid& receivers,
                                  const Block& block, std::byte* shared, uint64_t epoch) {
    if (is_receiver) {
      RoutingTable(args.send, block, shared).send(receivers, epoch);
    } else {
      DispatchSend::send_whole_rows(args.send, senders, block, shared, epoch);
    }
  }
};

struct Combine {
  using Args = CombineArgs;
  static constexpr const char* kName = "combine";

  static size_t shared_bytes(const Args& args) {
    return std::max(CombineSend::shared_bytes(args.send), CombineRecv::shared_bytes(args.recv));
  }

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte* shared) {
    const Context& c = args.send.context;
    const uint64_t start = trace_now();
    // Small batches are sent before the first words of another rank can be here: all blocks do both.
    const bool small = c.ws.all_send_ll(args.send.buffer, 0);
    const int senders = small ? grid.size() : args.num_send_blocks, not_receivers = small ? 0 : senders;
    const bool is_sender = grid.rank() < senders, is_receiver = grid.rank() >= not_receivers;
    const OwnSums own(&args.send);
    if (is_sender && !args.send.is_sent) CombineSend::run(args.send, Grid{grid.rank(), senders}, block, shared, own);
    if (is_receiver) {
      CombineRecv::run(args.recv, Grid{grid.rank() - not_receivers, grid.size() - not_receivers}, block, shared, own);
    }
    if (!small) record_role(c, block, is_sender ? moe_op::kCombineSend : moe_op::kCombineRecv, start);
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
