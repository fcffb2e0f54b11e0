// Both halves of a call in one launch, as roles: the first blocks send, the others receive at the same time. For calls
// with nothing in between, where a second launch would only start when the last sender has ended.
#pragma once

#include "kernels/combine_recv.h"
#include "kernels/combine_send.h"
#include "kernels/dispatch_recv.h"
#include "kernels/dispatch_send.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// A block's part of the launch, on the track of each of its warps.
MOE_A2A_DEVICE void record_role(const Context& c, const Block& block, Operation role, uint64_t start) {
  record(c.trace(), block.warp(), {.kind = TraceKind::kKernel, .begin = start, .token = static_cast<int>(role)});
}

template <class Send, class Recv, class Args>
size_t shared_bytes_of_both(const Args& args) {
  const size_t send = Send::shared_bytes(args.send), recv = Recv::shared_bytes(args.recv);
  return send > recv ? send : recv;
}

struct Dispatch {
  using Args = DispatchArgs;
  static constexpr const char* kName = "dispatch";

  static size_t shared_bytes(const Args& args) { return shared_bytes_of_both<DispatchSend, DispatchRecv>(args); }

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte* shared) {
    const Context& c = args.send.context;
    const uint64_t epoch = c.ws.epoch(args.send.buffer) + 1;
    const int senders = args.num_send_blocks;
    // The receivers have nothing to look at before tables come, so they send this rank's.
    const bool is_sender = grid.rank() < senders;
    const uint64_t start = trace_now(c.trace());
    const Grid role = is_sender ? Grid{grid.rank(), senders} : Grid{grid.rank() - senders, grid.size() - senders};
    if (is_sender) DispatchSend::prefetch_first_unit(args.send, role, block);
    if (DispatchSend::wait_for_credits(c, block, args.send.buffer, epoch)) {
      if (is_sender) {
        DispatchSend::send_rows(args.send, role, block, shared, epoch);
      } else {
        RoutingTable(args.send, block, shared).send(role, epoch);
        block.sync();  // the table's memory is the lists' now
        DispatchRecv::receive(args.recv, role, block, shared, epoch);
      }
    }
    record_role(c, block, is_sender ? Operation::kDispatchSend : Operation::kDispatchRecv, start);
    DispatchSend::advance_epoch(c, args.send.buffer, grid, block, epoch);
  }
};

struct Combine {
  using Args = CombineArgs;
  static constexpr const char* kName = "combine";

  static size_t shared_bytes(const Args& args) { return shared_bytes_of_both<CombineSend, CombineRecv>(args); }

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte* shared) {
    const int senders = args.num_send_blocks;
    const bool is_sender = grid.rank() < senders;
    const uint64_t start = trace_now(args.send.context.trace());
    if (is_sender) {
      CombineSend::run(args.send, Grid{grid.rank(), senders}, block, shared);
    } else {
      CombineRecv::run(args.recv, Grid{grid.rank() - senders, grid.size() - senders}, block, shared);
    }
    record_role(args.send.context, block, is_sender ? Operation::kCombineSend : Operation::kCombineRecv, start);
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
