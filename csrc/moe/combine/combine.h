// Both halves of a combine in one launch: the steps of CombineSend and CombineRecv, assigned to blocks as roles, as in
// dispatch/dispatch.h.
#pragma once

#include <algorithm>

#include "moe/combine/coded_combine_send.h"
#include "moe/combine/combine_recv.h"
#include "moe/combine/combine_send.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

template <class Send>
struct BothCombineHalves {
  using Args = BothCombineArgs<typename Send::Args>;
  static constexpr const char* kName = "combine";

  static size_t shared_bytes(const Args& args) {
    return std::max(Send::shared_bytes(args.send), CombineRecv::shared_bytes(args.recv));
  }

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte* shared) {
    const Context& c = args.send.context;
    CombineSend::prefetch_schedule(c, args.send.buffer, block);
    with_wire(c.region.sums_return_ll(args.send.buffer), [&](auto type) MOE_A2A_INLINED {
      constexpr bool kAllDoBoth = decltype(type)::type::kIsLl;
      const uint64_t start = trace_now();
      const int num_senders = kAllDoBoth ? 0 : args.num_send_blocks;
      const Grid receivers{grid.rank() - num_senders, grid.size() - num_senders};
      const Grid senders = kAllDoBoth ? grid : Grid{grid.rank(), num_senders};
      const OwnSums own(&args.send);
      if (kAllDoBoth) CombineRecv::prefetch_first_part(args.recv, receivers, block);
      if (has_part_in(senders) && !args.send.is_sent) Send::send(type, args.send, own, senders, block, shared);
      if (has_part_in(receivers)) CombineRecv::receive(type, args.recv, own, receivers, block, shared);
      if (kAllDoBoth) return;
      record_role(c, block.warp(), has_part_in(senders) ? moe_op::kCombineSend : moe_op::kCombineRecv, start);
    });
  }
};

struct Combine : BothCombineHalves<CombineSend> {};
struct CodedCombine : BothCombineHalves<CodedCombineSend> {};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
