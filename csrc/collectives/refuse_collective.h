// Launched in place of a call that failed before its launch: the peers learn why, and every rank advances its epoch.
#pragma once

#include "collectives/meeting.h"
#include "comm/refusal_text.h"

namespace moe_a2a {

struct RefuseCollectiveArgs {
  CollectiveContext context;
  Announcement announcement;
  RefusalText text;
};

}  // namespace moe_a2a

namespace moe_a2a::inline MOE_A2A_TARGET {

struct RefuseCollective {
  using Args = RefuseCollectiveArgs;
  static constexpr const char* kName = "refuse_collective";

  // Does not wait for the others' part in this epoch: the next launch does (Seen::kNothing).
  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte*) {
    CallState& state = args.context.region.state(0);
    if (has_given_up(state)) return;  // as in run_call()
    const uint32_t before = seen_in_halves(state);
    const uint64_t newest = newest_epoch(state);
    const Part part{args.context, args.announcement, collective_op::kRefuse, newest + 1, poison_of(args.context.wait)};
    if (seen_of(before, newest) != Seen::kSignals && !catch_up(part, block)) return;
    leave_text(args.context, part.half(), block, args.text);
    if (block.rank() == 0) fence_before_signals();  // orders the text, behind leave_text()'s barrier
    signal_call(part, block);
    announce(part, block);
    block.sync();  // as in run_call()
    if (block.rank() == 0) {
      begin_epoch(state, part.epoch, before, Seen::kNothing);
      advance_epoch(state, grid);
    }
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
