// Combine of what simulated experts make of the landed rows: the sums are formed as they are sent.
#pragma once

#include "moe/combine/combine.h"
#include "moe/experts/simulated_sum.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// Source: the sums of the rows as scaled by the local experts.
struct SimulatedRows : FormedRows {
  const SimulatedCombineSendArgs& args;

  template <class Group, class Sender>
  MOE_A2A_DEVICE void send(const Group& group, Sender& sender, const Scheduled& scheduled, const Piece& piece) const {
    send_formed(sender, scheduled.delivery, piece, [&]<class T>(T* target) {
      const SimulatedSum<T> sum(args.context, args.buffer, args.layout, args.scales, scheduled.row);
      sum.store(group, piece, args.vector_rows, target);
    });
  }
};

struct SimulatedCombineSend {
  using Args = SimulatedCombineSendArgs;
  static constexpr const char* kName = "combine_send";

  static size_t shared_bytes(const Args& args) { return CombineSend::shared_bytes(args); }

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte* shared) {
    with_wire(args.context.region.sums_return_ll(args.buffer),
              [&](auto wire) MOE_A2A_INLINED { send(wire, args, OwnSums(), grid, block, shared); });
  }

  template <class Wire>
  MOE_A2A_DEVICE static void send(std::type_identity<Wire>, const Args& args, const OwnSums& own, const Grid& grid,
                                  const Block& block, std::byte* shared) {
    const Context& c = args.context;
    const uint64_t epoch = c.region.epoch(args.buffer);
    const Exchange exchange = combine_rows(c, args.buffer, epoch);
    const RowLayout layout = CombineSend::layout(args);
    const typename Wire::Plan plan = Wire::plan(layout, StagedFor::kSumming, c.max_shared_bytes);
    Wire wire(exchange, layout, grid, block, shared, plan, c.region.tickets.at(args.buffer, MoeRegion::kCombineQueue));
    const CombineSchedule<Wire> schedule(c, args.buffer, own);
    CombineSend::send_formed(wire, schedule, SimulatedRows{{layout}, args}, grid, block);
    CombineSend::finish(args, grid, block, epoch);
  }
};

struct SimulatedCombine : BothCombineHalves<SimulatedCombineSend> {};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
