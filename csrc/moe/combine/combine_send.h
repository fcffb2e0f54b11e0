// Step 3 of 4: push the sum of each landed row back to its owner, as LL words if every rank's batch allows it
// (MoeConfig::returns_ll), else as whole rows.
#pragma once

#include "moe/combine/credit.h"
#include "moe/combine/landed_sums.h"
#include "moe/combine/own_sums.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// A landed row as a delivery back to the rank of its token.
MOE_A2A_DEVICE Scheduled to_owner(const Context& c, int row) {
  const auto [owner, token] = c.config.by_max_tokens.divide(row);
  return {{RankSet::only(owner), token, owner}, row};
}

// Whether the rows of all dispatches so far are here.
MOE_A2A_DEVICE bool has_landed(const Context& c) { return c.region.has_given_up(0) == 0; }

// Schedule: the landed rows, without this rank's own if their sums are kept. The region is read once, here.
class LandedSchedule {
 public:
  static constexpr bool kIsToOneRank = true;

  MOE_A2A_DEVICE LandedSchedule(const Context& c, int buffer, const OwnSums& own)
      : c_(c),
        buffer_(buffer),
        num_landed_(c.region.landed_offsets(buffer, c.heap.num_ranks)),
        begin_own_(c.region.landed_offsets(buffer, c.heap.rank)),  // loaded with the others, needed or not
        end_own_(c.region.landed_offsets(buffer, c.heap.rank + 1)),
        num_rows_(has_landed(c) ? num_landed_ - (own.are_kept() ? end_own_ - begin_own_ : 0) : 0) {}

  MOE_A2A_DEVICE int num_rows() const { return num_rows_; }

 protected:
  const Context& c_;
  int buffer_;
  int num_landed_, begin_own_, end_own_, num_rows_;
};

// In memory order, starting after this rank's own rows, which come last.
template <class Wire>
struct CombineSchedule : LandedSchedule {
  using LandedSchedule::LandedSchedule;

  MOE_A2A_DEVICE Scheduled at(const Warp&, int i) const {
    const int behind = end_own_ + i, landed = behind < num_landed_ ? behind : behind - num_landed_;
    return to_owner(c_, c_.region.landed_row(buffer_, landed));
  }
};

// Whole rows: the order stored by dispatch_recv (ExpertLists::write_combine_order).
template <>
struct CombineSchedule<RowWire> : LandedSchedule {
  MOE_A2A_DEVICE CombineSchedule(const Context& c, int buffer, const OwnSums& own)
      : LandedSchedule(c, buffer, own),
        order_(c.region.combine_order.at(buffer, own.are_kept() ? MoeRegion::kPeersRows : MoeRegion::kAllRows)) {}

  MOE_A2A_DEVICE Scheduled at(const Warp&, int i) const { return to_owner(c_, order_[i]); }

 private:
  const int32_t* order_;
};

struct CombineSend {
  using Args = CombineSendArgs;
  static constexpr const char* kName = "combine_send";

  MOE_A2A_HOST_DEVICE static RowLayout layout(const Args& args) {
    return args.context.config.row(args.context.config.dtype);
  }
  MOE_A2A_HOST_DEVICE static bool streams(const Args& args) {
    return !args.presummed && can_stream(args.context.config.num_topk, args.vector_rows, layout(args).num_bytes());
  }
  MOE_A2A_HOST_DEVICE static StagedFor staged_for(const Args& args) {
    if (args.presummed) return staged_for_sending(layout(args), args.y);
    return streams(args) ? StagedFor::kStreaming : StagedFor::kSumming;
  }

  template <class Wire>
  MOE_A2A_HOST_DEVICE static typename Wire::Plan plan(const Args& args) {
    return Wire::plan(layout(args), staged_for(args), args.context.max_shared_bytes);
  }
  // The wire depends on the largest batch of any rank, which the host does not know: reserve for both.
  static size_t shared_bytes(const Args& args) {
    const int rows = plan<RowWire>(args).bytes;
    const int words = args.context.config.num_max_ll_tokens > 0 ? plan<LlWire>(args).bytes : 0;
    return rows > words ? rows : words;
  }

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte* shared) {
    with_wire(args.context.region.sums_return_ll(args.buffer),
              [&](auto wire) MOE_A2A_INLINED { send(wire, args, OwnSums(), grid, block, shared); });
  }

  // Prefetches what sending reads first, by whatever wire: in flight together with the word that chooses the wire.
  MOE_A2A_DEVICE static void prefetch_schedule(const Context& c, int buffer, const Block& block) {
    if (block.rank() != 0) return;
    prefetch(c.region.epoch.at(buffer));
    prefetch(c.region.has_given_up.data);
    prefetch(c.region.landed_offsets.at(buffer));
    prefetch(c.region.landed_row.at(buffer));
  }
  // The step, run by its own launch or by a fused one (combine.h).
  template <class Wire>
  MOE_A2A_DEVICE static void send(std::type_identity<Wire> type, const Args& args, const OwnSums& own, const Grid& grid,
                                  const Block& block, std::byte* shared) {
    const Context& c = args.context;
    const uint64_t epoch = c.region.epoch(args.buffer);
    const Exchange exchange = combine_rows(c, args.buffer, epoch);
    const typename Wire::Plan plan = CombineSend::plan<Wire>(args);
    Wire wire(exchange, layout(args), grid, block, shared, plan,
              c.region.tickets.at(args.buffer, MoeRegion::kCombineQueue));
    const CombineSchedule<Wire> schedule(c, args.buffer, own);
    if (args.presummed) {
      wire.send(schedule, PresummedRows{{layout(args)}, args});
    } else {
      send_sums(type, args, wire, schedule, grid, block);
    }
    finish(args, grid, block, epoch);
  }

  // Sends rows that groups of threads form in place.
  template <class Wire, class Source>
  MOE_A2A_DEVICE static void send_formed(Wire& wire, const CombineSchedule<Wire>& schedule, const Source& source,
                                         const Grid& grid, const Block& block) {
    if constexpr (!Wire::kIsLl) {
      if (schedule.num_rows() < grid.size() * block.num_warps() / 2) return wire.send_by_blocks(schedule, source);
    }
    wire.send(schedule, source);
  }

  // Called by every warp once it has sent its rows; the last of all blocks resets the queue and returns the credit.
  MOE_A2A_DEVICE static void finish(const Args& args, const Grid& grid, const Block& block, uint64_t epoch) {
    const Context& c = args.context;
    if (block.is_closing_warp() && count_block(grid, c.region.arrivals.at(args.buffer, MoeRegion::kCombineSend))) {
      c.region.tickets(args.buffer, MoeRegion::kCombineQueue) = 0;
      return_credit(c, args.buffer, epoch, args.note);
    }
  }

 private:
  MOE_A2A_DEVICE static void send_sums(std::type_identity<LlWire>, const Args& args, LlWire& wire,
                                       const CombineSchedule<LlWire>& schedule, const Grid& grid, const Block& block) {
    send_formed(wire, schedule, SummedRows{{layout(args)}, args}, grid, block);
  }
  MOE_A2A_DEVICE static void send_sums(std::type_identity<RowWire>, const Args& args, RowWire& wire,
                                       const CombineSchedule<RowWire>& schedule, const Grid& grid, const Block& block) {
    if (streams(args)) {
      with_element_type(layout(args).dtype,
                        [&](auto type) { wire.send(schedule, StreamedRows<decltype(type)>{args, layout(args)}); });
    } else {
      send_formed(wire, schedule, SummedRows{{layout(args)}, args}, grid, block);
    }
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
