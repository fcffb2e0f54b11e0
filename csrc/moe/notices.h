// Small one-block launches by which a rank tells its peers that it does not take part as expected.
#pragma once

#include "comm/refusal_text.h"
#include "moe/combine/credit.h"
#include "moe/dispatch/dispatch_send.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// Pairs with the acquire in is_refused(), in combine_recv's waits.
MOE_A2A_DEVICE void refuse_combine(const Context& c, int buffer, uint64_t epoch, uint32_t count) {
  signal_many(c.heap, RankSet::all(c.heap.num_ranks), c.region.combine_refusal.at(buffer, c.heap.rank), epoch, count);
}

// Replaces dispatch_send for a call with bad arguments: the epoch advances on every rank, without rows from this rank.
struct RefuseDispatch {
  using Args = RefuseDispatchArgs;
  static constexpr const char* kName = "refuse_dispatch";

  MOE_A2A_DEVICE static void run(const Args& args, const Grid&, const Block& block, std::byte*) {
    const Context& c = args.context;
    const uint64_t epoch = c.region.epoch(args.buffer) + 1;
    if (block.any(!DispatchSend::await_credits(c, block, args.buffer, epoch, args.number))) return;
    leave_text(c, args.buffer, block, args.text);
    if (block.rank() != 0) return;
    const RankSet all = RankSet::all(c.heap.num_ranks);
    signal_many(c.heap, all, c.region.table_signal.at(args.buffer, c.heap.rank, 0), epoch, BatchHeader::kRefused);
    return_credit(c, args.buffer, epoch, {.since = args.number.since});
    refuse_combine(c, args.buffer, epoch, RefusalCount::kFinal);  // a peer may have queued its combine already
    advance_epoch(c.region, args.buffer, epoch);
  }
};

// For a dispatch that this rank has no buffer for. Pairs with the acquire in DispatchSend::await_credit().
struct RefuseAnyBuffer {
  using Args = RefuseAnyBufferArgs;
  static constexpr const char* kName = "refuse_any_buffer";

  MOE_A2A_DEVICE static void run(const Args& args, const Grid&, const Block& block, std::byte*) {
    const Context& c = args.context;
    leave_text(c, DispatchSend::text_slot(c), block, args.text);
    if (block.rank() != 0) return;
    signal_many(c.heap, RankSet::all(c.heap.num_ranks), c.region.dispatch_refusal.at(c.heap.rank), args.number);
  }
};

// Replaces combine_send: peers leave this attempt of the combine, and may retry together with this rank.
struct RefuseCombine {
  using Args = RefuseCombineArgs;
  static constexpr const char* kName = "refuse_combine";

  MOE_A2A_DEVICE static void run(const Args& args, const Grid&, const Block& block, std::byte*) {
    const Context& c = args.context;
    leave_text(c, args.buffer, block, args.text);
    if (block.rank() == 0) refuse_combine(c, args.buffer, c.region.epoch(args.buffer), args.count);
  }
};

// Gives a buffer back without a combine. The peers' combine ends with a refusal instead of at the deadline.
struct Release {
  using Args = ReleaseArgs;
  static constexpr const char* kName = "release";

  MOE_A2A_DEVICE static void run(const Args& args, const Grid&, const Block& block, std::byte*) {
    const Context& c = args.context;
    if (args.text.word[0] != 0) leave_text(c, args.buffer, block, args.text);
    if (block.rank() != 0) return;
    const uint64_t epoch = c.region.epoch(args.buffer);
    return_credit(c, args.buffer, epoch, args.note);
    refuse_combine(c, args.buffer, epoch, RefusalCount::kFinal);
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
