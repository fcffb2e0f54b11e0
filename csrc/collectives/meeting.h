// How every launch of the collectives begins and ends: it announces its call to all ranks, sends, and uses the others'
// data once all of them have announced the same call.
#pragma once

#include "collectives/collective_region.h"
#include "collectives/vocabulary.h"
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
  MOE_A2A_DEVICE CallState& state() const { return context.region.state(0); }
};

// A slice of the block's work on chunk i.
MOE_A2A_DEVICE void record_chunk(const Part& part, const Block& block, TraceKind kind, uint64_t start, int i) {
  record(part.context.trace(), block, {.kind = kind, .begin = start, .token = i});
}

// The LL words in which src announces its call.
inline constexpr int kAnnouncementWords = num_ll_words(Announcement::kWords);
static_assert(kAnnouncementWords * sizeof(LlWord) <= kAnnouncementBytes);

MOE_A2A_DEVICE LlWord* announcement_of(const Part& part, int src) {
  return reinterpret_cast<LlWord*>(part.context.region.announcement.at(part.half(), src));
}

// Tells every rank which call this is. Run by one block. Once a wait has given up, of this client or another, this rank
// announces nothing, so no peer uses what it sends: its values may depend on data that never arrived, and a peer that
// is only late would not know.
MOE_A2A_DEVICE void announce(const Part& part, const Block& block) {
  if (part.poison != 0) return;
  for (int i = block.rank(); i < part.num_ranks() * kAnnouncementWords; i += block.size()) {
    const int w = i % kAnnouncementWords;
    LlWord word{.stamp = ll_stamp(part.epoch)};
    for (int d = 0; d < kLlData && w * kLlData + d < Announcement::kWords; ++d) {
      word.data[d] = part.announcement.word[w * kLlData + d];
    }
    store_ll(part.context.heap.peer(i / kAnnouncementWords, announcement_of(part, part.rank()) + w), word);
  }
}

// Tells every rank that this one has begun the call, and orders what its earlier launches did. Run by one block. Call
// it before announce() where others wait for both: it may fence, which would wait for the announcement's stores.
MOE_A2A_DEVICE void signal_call(const Part& part, const Block& block) {
  if (part.poison == 0 && block.rank() == 0) {  // pairs with the acquire in makes_this_call() and catch_up()
    const CollectiveContext& c = part.context;
    signal_earlier_launches(c.heap, RankSet::all(part.num_ranks()), c.region.call_signal.at(part.half(), part.rank()),
                            part.epoch);
  }
}

// Reads rank r's announcement; false if it has not arrived.
MOE_A2A_DEVICE bool has_announced(const Part& part, int r, Announcement& theirs, uint64_t& seen) {
  bool all = true;
  MOE_A2A_UNROLL
  for (int w = 0; w < kAnnouncementWords; ++w) {
    const LlWord word = load_ll(announcement_of(part, r) + w);
    all = has_epoch(word, part.epoch, seen) && all;
    MOE_A2A_UNROLL
    for (int d = 0; d < kLlData && w * kLlData + d < Announcement::kWords; ++d) {
      theirs.word[w * kLlData + d] = word.data[d];
    }
  }
  return all;
}

MOE_A2A_DEVICE bool are_same(const Announcement& a, const Announcement& b) {
  bool same = true;
  MOE_A2A_UNROLL
  for (int i = 0; i < Announcement::kWords; ++i) same &= a.word[i] == b.word[i];
  return same;
}

// Stops the launch because a rank refused this call or makes a different one, and reports it if `reports`. In the
// latter case the report's text is the peer's announcement, followed by this rank's.
MOE_A2A_RARE void stop_call(Part part, WaitSite site, Announcement theirs, bool reports) {
  const CollectiveContext& c = part.context;
  if (reports) {
    WaitPolicy policy = c.wait;
    if (!theirs.is_refusal()) {
      uint64_t* words = c.region.other_call.at(part.half(), site.peer);
      for (int i = 0; i < Announcement::kWords; ++i) {
        atomic_store<Order::kRelaxed, Scope::kSystem>(words + i, uint64_t{theirs.word[i]});
        atomic_store<Order::kRelaxed, Scope::kSystem>(words + Announcement::kWords + i,
                                                      uint64_t{part.announcement.word[i]});
      }
      policy.refusal_text = c.region.other_call.data;
      site.awaited = collective_kind::kDisagreement;
    }
    write_report(policy, c.heap, site, Reason::kRefused, 0, part.epoch, Signal::pack(part.epoch, 0), 0);
  }
  set_failed(part.state(), part.epoch, true);  // ends waits for chunks that will not come
}

// Waits until rank r has announced a call; false if it is another one or the rank did not arrive. Each block checks for
// itself, so that none uses what belongs to another call. Block 0 reports.
MOE_A2A_DEVICE bool makes_this_call(const Part& part, const Grid& grid, int r) {
  const CollectiveContext& c = part.context;
  const WaitSite site{part.operation, collective_kind::kCallWait, r, -1, part.half()};
  Announcement theirs;
  const auto is_here = [&](uint64_t& seen) {
    return has_arrived(c.region.call_signal.at(part.half(), r), part.epoch, seen, nullptr) &&
           has_announced(part, r, theirs, seen);
  };
  if (!wait_until(part.epoch, site, c.wait, c.heap, {}, is_here)) return false;
  if (are_same(theirs, part.announcement)) return true;
  stop_call(part, site, theirs, grid.rank() == 0);
  return false;
}

// The same for this thread's ranks.
MOE_A2A_DEVICE bool all_make_this_call(const Part& part, const Grid& grid, const Block& block) {
  bool good = true;
  for (int r = block.rank(); r < part.num_ranks(); r += block.size()) good &= makes_this_call(part, grid, r);
  return good;
}

// Waits until all ranks have announced this call; false if one announced a different call or did not arrive.
MOE_A2A_DEVICE bool meet(const Part& part, const Grid& grid, const Block& block) {
  return !block.any(!all_make_this_call(part, grid, block));
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

// Waits for chunk i of rank r; false if it did not arrive, or if the launch has failed in another thread.
MOE_A2A_DEVICE bool wait_for_signal(const Part& part, const Signal* signal, int r, int i) {
  const CollectiveContext& c = part.context;
  const WaitSite site{part.operation, collective_kind::kChunkWait, r, i};
  uint32_t polls = 0;
  bool is_stopped = false;
  const auto has_ended = [&](uint64_t& word) {
    if (has_arrived(signal, part.epoch, word, nullptr)) return true;
    is_stopped = ++polls % kPollsPerLook == 0 && has_failed(part.state(), part.epoch);
    return is_stopped;
  };
  return wait_until(part.epoch, site, c.wait, c.heap, {}, has_ended) && !is_stopped;
}

// Waits for chunk i of all of `ranks`; false if one of them did not arrive.
MOE_A2A_DEVICE bool wait_for_signals(const Part& part, const Block& block, int first, const Array<Signal, 3>& signals,
                                     const RankSet& ranks, int i) {
  for (int r = first; r < part.num_ranks(); r += block.size()) {
    if (ranks.contains(r) && !wait_for_signal(part, signals.at(part.half(), r, i), r, i)) return false;
  }
  return true;
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
  CallState& state = args.context.region.state(0);
  const uint32_t poison = poison_of(args.context.wait), before = seen_in_halves(state);
  const uint64_t newest = newest_epoch(state);
  const bool has_left = has_given_up(state);                // loaded with the others: one trip to the cache
  if (args.slice > 0 && has_failed(state, newest)) return;  // the same on every rank
  // A peer that is only late may still read what the newest launches have sent, so this one writes nothing.
  if (has_left) return report_poison(args.context, operation, newest + 1);
  const Part part{args.context, args.announcement, operation, newest + 1, poison};
  const bool is_leader = block.rank() == 0;
  if (is_leader && grid.rank() == 0) begin_epoch(state, part.epoch, before, seen);
  if (is_leader && poison != 0) set_given_up(state);
  const bool good = (seen_of(before, newest) <= seen || catch_up(part, block)) && body(part);
  block.sync();  // all threads have read the state
  if (!is_leader) return;
  if (!good) set_failed(state, part.epoch, true);
  if (!good && poison_of(args.context.wait) != 0) set_given_up(state);
  advance_epoch(state, grid);
}

// A launch whose values travel as rows. send(part) writes and signals without waiting; receive(part) may wait for the
// others' data, and returns false if a rank did not arrive. The last block announces: in small calls on a GPU it has no
// chunk, so no rank's values wait for the fence before its signals.
template <class Args, class Send, class Receive>
MOE_A2A_DEVICE void take_part(const Args& args, Operation operation, const Grid& grid, const Block& block,
                              const Send& send, const Receive& receive) {
  run_call(args, operation, Seen::kSignals, grid, block, [&](const Part& part) MOE_A2A_INLINED {
    if (grid.rank() == grid.size() - 1) {
      signal_call(part, block);
      announce(part, block);
    }
    send(part);
    return receive(part);
  });
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
