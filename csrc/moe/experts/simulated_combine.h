// Combine of what simulated experts make of the landed rows: the sums are formed as they are sent.
#pragma once

#include "moe/combine/combine.h"
#include "moe/experts/simulated_sum.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// Source: a group of threads forms each sum in registers and stores it where the sender wants it.
struct SimulatedRows {
  static constexpr TraceKind kKind = moe_kind::kSum;
  const SimulatedCombineSendArgs& args;
  RowLayout layout;

  template <class Port, class F>
  MOE_A2A_DEVICE void with_row_sender(const Port& port, const F& f) const {
    InPlaceSender sender(port.warp, port.slot_at, port.done);
    f(sender);
  }
  template <class Group, class Sender>
  MOE_A2A_DEVICE void send(const Group& group, Sender& sender, const Scheduled& scheduled, const Piece& piece) const {
    RowSource row = layout.part(piece);
    std::byte* target = sender.open_stage(scheduled.delivery);
    with_element_type(layout.dtype, [&](auto type) {
      using T = decltype(type);
      const SimulatedSum<T> sum(args.context, args.buffer, args.layout, args.scales, scheduled.row);
      sum.store(group, piece, args.vector_rows, reinterpret_cast<T*>(target));
    });
    row.values = target;
    row.in_shared = true;
    sender.send_staged(row, scheduled.delivery);
  }
};

struct SimulatedCombineSend {
  using Args = SimulatedCombineSendArgs;
  static constexpr const char* kName = "combine_send";

  static size_t shared_bytes(const Args& args) { return CombineSend::shared_bytes(args); }

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte* shared) {
    with_wire(args.context.region.sums_return_ll(args.buffer, 0),
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
    Wire wire(exchange, layout, grid, block, shared, plan, c.region.tickets.at(args.buffer, MoeRegion::kCombineSend));
    const CombineSchedule<Wire> schedule(c, args.buffer, own);
    CombineSend::send_formed(wire, schedule, SimulatedRows{args, layout}, grid, block);
    CombineSend::finish(args, grid, block, epoch);
  }
};

struct SimulatedCombine : BothCombineHalves<SimulatedCombineSend> {};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
