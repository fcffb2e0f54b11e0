// combine_send beside the product whose rows it sums, in one launch: each row leaves as soon as its terms are stored.
// Whole rows only.
#pragma once

#include "moe/combine/combine_send.h"
#include "moe/experts/stored_tiles.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// Visits the positions of `y` in the order in which the product stores them: expert by expert. A landed row is sent at
// the last of its positions, after a wait for all of them; nothing is sent at its others. In CombineSchedule's order
// the first rows would be as likely as the rest to wait for the last expert. Not for the masked layout, whose positions
// have gaps.
class StoredSchedule {
 public:
  static constexpr bool kIsToOneRank = true, kBlocksJoinLate = true;

  MOE_A2A_DEVICE StoredSchedule(const CombineSendArgs& args, const StoredTiles& stored)
      : args_(args),
        stored_(stored),
        num_positions_(has_landed(args.context)
                           ? args.context.region.expert_offsets(args.buffer, args.context.config.num_local_experts)
                           : 0) {}

  MOE_A2A_DEVICE int num_units() const { return num_positions_; }

  // Calls send(scheduled) if the position is the last of a row, once the row's terms are stored.
  template <class Send>
  MOE_A2A_DEVICE void visit(const Warp& warp, int position, const Send& send) const {
    const int row = row_completed_at(position);
    if (row < 0) return;
    wait_for_terms(warp, row);
    send(to_owner(args_.context, row));
  }

 private:
  // The landed row whose last position this is; -1: the row has later ones, or this is padding between experts.
  MOE_A2A_DEVICE int row_completed_at(int position) const {
    const int row = args_.context.region.expert_row_index(args_.buffer, position);
    if (row < 0) return -1;
    const RouteTerm* terms = terms_of(row);
    for (int k = 0; k < args_.context.config.num_topk && terms[k].position >= 0; ++k) {
      if (terms[k].position > position) return -1;
    }
    return row;
  }
  MOE_A2A_DEVICE void wait_for_terms(const Warp& warp, int row) const {
    const RouteTerm* terms = terms_of(row);
    for (int k = 0; k < args_.context.config.num_topk && terms[k].position >= 0; ++k) {
      if (k % warp.size() == warp.rank() && terms[k].position < args_.num_y_rows) wait_for_term(terms[k].position, row);
    }
    warp.sync();  // lets the other lanes read what the waiting ones have acquired
  }
  MOE_A2A_DEVICE void wait_for_term(int position, int row) const {
    const Context& c = args_.context;
    const uint64_t start = trace_now();
    const uint32_t polls = stored_.wait_for_row(position);
    if (!kRecording || polls == 1 || !trace_is_on()) return;
    const int token = row % c.config.num_max_tokens_per_rank;
    append(c.trace(), {.kind = moe_kind::kStoredWait, .begin = start, .token = token, .polls = polls}, clock_now());
  }
  MOE_A2A_DEVICE const RouteTerm* terms_of(int row) const {
    return args_.context.region.landed_term.at(args_.buffer, row);
  }

  const CombineSendArgs& args_;
  StoredTiles stored_;
  int num_positions_;
};

struct CombineSendStored {
  MOE_A2A_HOST_DEVICE static RowWire::Plan plan(const CombineSendArgs& args, int num_warps = kBlockWarps) {
    return RowWire::plan(CombineSend::layout(args), CombineSend::staged_for(args), args.context.max_shared_bytes,
                         num_warps);
  }

  MOE_A2A_DEVICE static void send(const CombineSendArgs& args, const StoredTiles& stored, const Grid& grid,
                                  const Block& block, std::byte* shared) {
    const Context& c = args.context;
    const uint64_t epoch = c.region.epoch(args.buffer);
    const Exchange exchange = combine_rows(c, args.buffer, epoch);
    const RowLayout layout = CombineSend::layout(args);
    const RowWire::Plan plan = CombineSendStored::plan(args, block.num_warps());
    RowWire wire(exchange, layout, grid, block, shared, plan,
                 c.region.tickets.at(args.buffer, MoeRegion::kCombineQueue));
    const StoredSchedule schedule(args, stored);
    if (CombineSend::streams(args)) {
      with_element_type(layout.dtype,
                        [&](auto type) { wire.send(schedule, StreamedRows<decltype(type)>{args, layout}); });
    } else {
      wire.send(schedule, SummedRows{{layout}, args});
    }
    CombineSend::finish(args, grid, block, epoch);
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
