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
  static constexpr bool kIsToOneRank = true;

  MOE_A2A_DEVICE StoredSchedule(const CombineSendArgs& args, const StoredTiles& stored)
      : args_(args), stored_(stored) {}

  MOE_A2A_DEVICE int num_rows() const {
    return args_.context.region.expert_offsets(args_.buffer, args_.context.config.num_local_experts());
  }

  MOE_A2A_DEVICE Scheduled at(const Warp& warp, int position) const {
    const MoeRegion& region = args_.context.region;
    const int row = region.expert_row_index(args_.buffer, position);
    if (row < 0) return {};  // padding between experts
    const RouteTerm* terms = region.landed_term.at(args_.buffer, row);
    const int num_terms = count_terms(terms);
    if (!is_last(terms, num_terms, position)) return {};
    for (int k = warp.rank(); k < num_terms; k += warp.size()) {
      if (terms[k].position < args_.num_y_rows) wait_for_term(terms[k].position, row);
    }
    warp.sync();  // lets the other lanes read what the waiting ones have acquired
    return to_owner(args_.context, row);
  }

 private:
  MOE_A2A_DEVICE void wait_for_term(int position, int row) const {
    const Context& c = args_.context;
    const uint64_t start = trace_now();
    const uint32_t polls = stored_.wait_for_row(position);
    if (!kRecording || polls == 1) return;
    const int token = row % c.config.num_max_tokens_per_rank;
    append(c.trace(), {.kind = moe_kind::kStoredWait, .begin = start, .token = token, .polls = polls}, clock_now());
  }
  MOE_A2A_DEVICE int count_terms(const RouteTerm* terms) const {
    int n = 0;
    while (n < args_.context.config.num_topk && terms[n].position >= 0) ++n;
    return n;
  }
  MOE_A2A_DEVICE static bool is_last(const RouteTerm* terms, int num_terms, int position) {
    for (int k = 0; k < num_terms; ++k) {
      if (terms[k].position > position) return false;
    }
    return true;
  }

  const CombineSendArgs& args_;
  StoredTiles stored_;
};

struct CombineSendStored {
  MOE_A2A_HOST_DEVICE static RowWire::Plan plan(const CombineSendArgs& args) {
    return RowWire::plan(CombineSend::layout(args), StagedFor::kSumming, args.context.max_shared_bytes);
  }

  // By blocks that do nothing else.
  MOE_A2A_DEVICE static void send(const CombineSendArgs& args, const StoredTiles& stored, const Grid& grid,
                                  const Block& block, std::byte* shared) {
    const Context& c = args.context;
    const uint64_t epoch = c.region.epoch(args.buffer);
    const Exchange exchange = combine_rows(c, args.buffer, epoch);
    const RowWire::Plan plan = CombineSendStored::plan(args);
    const RowLayout layout = CombineSend::layout(args);
    RowWire wire(exchange, layout, grid, block, shared, plan, ticket(args));
    wire.send(StoredSchedule(args, stored), SummedRows{args, layout});
    if (block.is_last_warp()) end(args, grid, epoch);
  }

  // By one of `num_workers` warps of blocks that do something else too. Needs no shared memory.
  MOE_A2A_DEVICE static void send_by_warp(const CombineSendArgs& args, const StoredTiles& stored, const Warp& warp,
                                          int worker, int num_workers) {
    const Context& c = args.context;
    const uint64_t epoch = c.region.epoch(args.buffer);
    const Exchange exchange = combine_rows(c, args.buffer, epoch);
    const RowLayout layout = CombineSend::layout(args);
    RowWire::send_in_place(exchange, layout, warp, WorkQueue(warp, worker, num_workers, ticket(args)),
                           StoredSchedule(args, stored), SummedRows{args, layout});
    warp.sync();
    if (warp.rank() == 0) end(args, Grid{worker, num_workers}, epoch);
  }

 private:
  MOE_A2A_DEVICE static uint32_t* ticket(const CombineSendArgs& args) {
    return args.context.region.tickets.at(args.buffer, MoeRegion::kCombineSend);
  }
  // Counts a block, or a warp that sends alone.
  MOE_A2A_DEVICE static void end(const CombineSendArgs& args, const Grid& grid, uint64_t epoch) {
    const Context& c = args.context;
    if (count_block(grid, c.region, args.buffer, MoeRegion::kCombineSend)) {
      CombineSend::return_credit(c, args.buffer, epoch, args.refused);
    }
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
