// How every launch of the collectives begins and ends: it announces its call to all ranks, sends, and reads the others'
// data once all of them have announced the same call.
#pragma once

#include "collectives/collective_region.h"
#include "collectives/vocabulary.h"
#include "comm/launch_count.h"
#include "comm/ll_word.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// One launch's part of a call, as its steps see it.
struct Part {
  const CollectiveContext& context;
  const Announcement& announcement;
  Operation operation;
  uint64_t epoch;
  uint32_t poison;  // poison_of() at the beginning

  MOE_A2A_DEVICE int half() const { return static_cast<int>(epoch % 2); }
  MOE_A2A_DEVICE int rank() const { return context.heap.rank; }
  MOE_A2A_DEVICE int num_ranks() const { return context.heap.num_ranks; }
  MOE_A2A_DEVICE RankSet others() const { return RankSet::all(num_ranks()).without(rank()); }
};

MOE_A2A_DEVICE LlWord* call_word_of(const Part& part, int src) {
  return reinterpret_cast<LlWord*>(part.context.region.call_word.at(part.half(), src));
}

// Tells every rank which call this is: first by an LL word, for calls whose values travel as words, then by the full
// announcement and a signal. Run by one block. Once a wait has given up, of this client or another, this rank announces
// nothing, so nobody takes what it sends: its values may rest on data that never arrived, and a peer that is only late
// would not know.
MOE_A2A_DEVICE void announce(const Part& part, const Block& block) {
  const CollectiveContext& c = part.context;
  uint64_t* local = c.region.announcement.at(part.half(), part.rank());
  const bool is_good = part.poison == 0;
  const LlWord word{.data = {part.announcement.terms_of_words()}, .stamp = ll_stamp(part.epoch)};
  for (int r = block.rank(); is_good && r < part.num_ranks(); r += block.size()) {
    store_ll(c.heap.peer(r, call_word_of(part, part.rank())), word);
    uint64_t* words = c.heap.peer(r, local);
    for (int i = 0; i < Announcement::kWords; ++i) {
      atomic_store<Order::kRelaxed, Scope::kSystem>(words + i, part.announcement.word[i]);
    }
  }
  block.release_sync();
  if (is_good && block.rank() == 0) {  // pairs with the acquire in meet() and catch_up()
    signal_many(c.heap, RankSet::all(part.num_ranks()), c.region.call_signal.at(part.half(), part.rank()), part.epoch);
  }
}

// Reports a rank that refused this call or makes a different one. In the latter case the report's text is the peer's
// announcement, followed by this rank's.
MOE_A2A_RARE void report_difference(Part part, WaitSite site) {
  const CollectiveContext& c = part.context;
  uint64_t* words = c.region.announcement.at(part.half(), site.peer);
  WaitPolicy policy = c.wait;
  if (Announcement::kind_of(atomic_load<Order::kRelaxed, Scope::kSystem>(words)) != CollectiveKind::kRefused) {
    for (int i = 0; i < Announcement::kWords; ++i) {
      atomic_store<Order::kRelaxed, Scope::kSystem>(words + Announcement::kWords + i, part.announcement.word[i]);
    }
    policy.refusal_text = c.region.announcement.data;
    site.awaited = collective_kind::kDisagreement;
  }
  write_report(policy, c.heap, site, Reason::kRefused, 0, part.epoch, Signal::pack(part.epoch, 0), 0);
}

MOE_A2A_DEVICE bool agrees(const Part& part, const WaitSite& site) {
  const uint64_t* words = part.context.region.announcement.at(part.half(), site.peer);
  bool same = true;
  for (int i = 0; i < Announcement::kWords; ++i) {
    same &= atomic_load<Order::kRelaxed, Scope::kSystem>(words + i) == part.announcement.word[i];
  }
  return same;
}

// Waits until all ranks have announced this call; false if one announced a different call or did not arrive. Each block
// checks for itself, so that none waits for data that will not come. One of them reports.
MOE_A2A_DEVICE bool meet(const Part& part, const Grid& grid, const Block& block) {
  const CollectiveContext& c = part.context;
  bool good = true;
  for (int r = block.rank(); r < part.num_ranks(); r += block.size()) {
    const WaitSite site{part.operation, collective_kind::kCallWait, r, -1, part.half()};
    if (!wait_for(c.region.call_signal.at(part.half(), r), part.epoch, site, c.wait, c.heap)) {
      good = false;
    } else if (!agrees(part, site)) {
      if (grid.rank() == 0) report_difference(part, site);
      good = false;
    }
  }
  return !block.any(!good);
}

// After a launch that has not observed enough of its peers: waits until all ranks have begun the previous epoch, and
// orders what they did before that.
MOE_A2A_DEVICE bool catch_up(const Part& part, const Block& block) {
  const CollectiveContext& c = part.context;
  bool good = true;
  for (int r = block.rank(); r < part.num_ranks(); r += block.size()) {
    const WaitSite site{part.operation, collective_kind::kCallWait, r};
    good &= wait_for(c.region.call_signal.at(1 - part.half(), r), part.epoch - 1, site, c.wait, c.heap);
  }
  return !block.any(!good);
}

// Waits for chunk i of all of `ranks`; false if one of them did not arrive.
MOE_A2A_DEVICE bool wait_for_chunk(const Part& part, const Block& block, const Array<Signal, 3>& signals,
                                   const RankSet& ranks, int i) {
  const CollectiveContext& c = part.context;
  bool good = true;
  for (int r = block.rank(); r < part.num_ranks(); r += block.size()) {
    if (!ranks.contains(r)) continue;
    const WaitSite site{part.operation, collective_kind::kChunkWait, r, i};
    good &= wait_for(signals.at(part.half(), r, i), part.epoch, site, c.wait, c.heap);
  }
  return !block.any(!good);
}

MOE_A2A_RARE void report_poison(const CollectiveContext& context, Operation operation, uint64_t epoch) {
  const WaitSite site{operation, collective_kind::kCallWait, context.heap.rank};
  write_report(context.wait, context.heap, site, Reason::kPoisoned, poison_of(context.wait), epoch, 0, 0);
}

// One launch. body(part) returns false if a rank did not arrive or makes a different call. `seen`: what it observes of
// this launch; if the previous launch observed less, this one catches up first.
template <class Args, class Body>
MOE_A2A_DEVICE void run_call(const Args& args, Operation operation, Seen seen, const Grid& grid, const Block& block,
                             const Body& body) {
  const CollectiveRegion& region = args.context.region;
  const CallState before = region.state(0);
  if (args.slice > 0 && before.is_refused != 0) return;  // the same on every rank
  // A peer that is only late may still read what the newest launches have sent, so this one writes nothing.
  if (before.has_given_up != 0) return report_poison(args.context, operation, before.epoch + 1);
  const Part part{args.context, args.announcement, operation, before.epoch + 1, poison_of(args.context.wait)};
  const bool good = (before.seen <= seen || catch_up(part, block)) && body(part);
  if (last_block_done(grid, block, region.arrivals.data)) {
    const bool has_given_up = part.poison != 0 || (!good && poison_of(args.context.wait) != 0);
    region.state(0) = {.epoch = part.epoch, .is_refused = !good, .has_given_up = has_given_up, .seen = seen};
  }
}

// A launch whose values travel as rows. send(part) writes and signals without waiting; receive(part) may wait for the
// others' data, and returns false if a rank did not arrive. The last block announces: in small calls on a GPU it has no
// chunk, so no rank's values wait for the fence behind the announcement.
template <class Args, class Send, class Receive>
MOE_A2A_DEVICE void take_part(const Args& args, Operation operation, const Grid& grid, const Block& block,
                              const Send& send, const Receive& receive) {
  run_call(args, operation, Seen::kSignals, grid, block, [&](const Part& part) {
    if (grid.rank() == grid.size() - 1) announce(part, block);
    send(part);
    return meet(part, grid, block) && receive(part);
  });
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
