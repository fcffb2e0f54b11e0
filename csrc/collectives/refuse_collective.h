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

  static size_t shared_bytes(const Args&) { return 0; }

  // Does not wait for the others' part in this epoch: the next launch does (Seen::kNothing).
  MOE_A2A_DEVICE static void run(const Args& args, const Grid&, const Block& block, std::byte*) {
    CallState& state = args.context.region.state(0);
    if (state.has_given_up != 0) return;  // as in run_call()
    const Part part{args.context, args.announcement, collective_op::kRefuse, state.epoch + 1,
                    poison_of(args.context.wait)};
    if (state.seen != Seen::kSignals && !catch_up(part, block)) return;
    leave_text(args.context, part.half(), block, args.text);
    announce(part, block);
    if (block.rank() == 0) state = {.epoch = part.epoch, .is_refused = 0, .seen = Seen::kNothing};
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
