// A launch as a pipeline: each block sends chunks ahead of the one that it waits for.
#pragma once

#include <type_traits>

#include "collectives/meeting.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// How many chunks a block sends ahead of the one that it waits for. All of them where waiting is expensive; elsewhere
// two, if it has two: what is signalled after one chunk arrives while the block works on the next.
MOE_A2A_DEVICE int chunks_ahead(int num_chunks, const Grid& grid) {
  if (kRanksShareCores) return (num_chunks + grid.size() - 1) / grid.size();
  return num_chunks <= grid.size() ? 1 : 2;
}

inline constexpr int kNoChunk = -1;

// Waits until chunk `used` of `senders` has landed and the results of `owners` for chunk `completed` are there, in
// different threads; before a block's first chunk also until all ranks make this call. False if a rank did not arrive.
MOE_A2A_DEVICE bool wait_for_chunks(const Part& part, const Grid& grid, const Block& block, int used,
                                    const RankSet& senders, int completed, const RankSet& owners) {
  const CollectiveRegion& region = part.context.region;
  const int half_way = (block.rank() + block.size() / 2) % block.size();
  bool good = used != grid.rank() || all_make_this_call(part, grid, block);
  if (used != kNoChunk) good = good && wait_for_signals(part, block, half_way, region.chunk_signal, senders, used);
  if (completed != kNoChunk) {
    good = good && wait_for_signals(part, block, block.rank(), region.result_signal, owners, completed);
  }
  return !block.any(!good);
}

// Tells `receivers` that chunk `sent` has landed, and `others` that the result for chunk `used` is there, behind one
// fence: pairs with the acquires in wait_for_chunks().
MOE_A2A_DEVICE void signal_chunks(const Part& part, const Block& block, int sent, const RankSet& receivers, int used,
                                  const RankSet& others) {
  if (sent == kNoChunk && used == kNoChunk) return;
  block.release_sync();
  if (block.rank() != 0) return;
  fence_before_signals();
  const CollectiveRegion& region = part.context.region;
  const auto store = [&](const Array<Signal, 3>& signals, const RankSet& ranks, int i) {
    if (i != kNoChunk) store_signals(part.context.heap, ranks, signals.at(part.half(), part.rank(), i), part.epoch);
  };
  store(region.chunk_signal, receivers, sent);
  store(region.result_signal, others, used);
}

// Runs a block's chunks through members of Steps. A round of the loop has one fence, at its end, since a fence holds up
// the whole block: what one member sends travels while the next one works.
//
//   kSend        sends chunk i to receivers_of(i), and waits for nothing
//   kUse         uses what senders_of(i) sent of chunk i; with kUseResults, sends others_with_own(i) a result
//   kUseResults  uses the results of owners_of(i) for chunk i
template <class Steps, auto kSend, auto kUse, auto kUseResults = nullptr, class Args>
MOE_A2A_DEVICE void run_pipeline(const Args& args, Operation operation, const Grid& grid, const Block& block) {
  constexpr bool kHasResults = !std::is_null_pointer_v<decltype(kUseResults)>;
  const auto send = [&](const Part& part) {
    const Steps steps(args, part, grid, block);
    const int num_chunks = steps.most_chunks(), end = chunks_ahead(num_chunks, grid) * grid.size();
    for (int i = grid.rank(); i < num_chunks && i < end; i += grid.size()) {
      (steps.*kSend)(i);
      signal_chunks(part, block, i, steps.receivers_of(i), kNoChunk, {});
    }
  };
  const auto receive = [&](const Part& part) {
    const Steps steps(args, part, grid, block);
    const int num_chunks = steps.most_chunks(), distance = chunks_ahead(num_chunks, grid) * grid.size();
    if (grid.rank() >= num_chunks) return meet(part, grid, block);
    const int end = num_chunks + (kHasResults ? distance : 0);
    for (int i = grid.rank(); i < end; i += grid.size()) {
      const int used = i < num_chunks ? i : kNoChunk, sent = i + distance < num_chunks ? i + distance : kNoChunk;
      const int completed = kHasResults && i >= distance ? i - distance : kNoChunk;
      const RankSet senders = used != kNoChunk ? steps.senders_of(used) : RankSet{};
      RankSet owners, others;
      if constexpr (kHasResults) {
        if (completed != kNoChunk) owners = steps.owners_of(completed);
        if (used != kNoChunk) others = steps.others_with_own(used);
      }
      if (!wait_for_chunks(part, grid, block, used, senders, completed, owners)) return false;
      if (used != kNoChunk) (steps.*kUse)(used);
      if (sent != kNoChunk) (steps.*kSend)(sent);
      if constexpr (kHasResults) {
        if (completed != kNoChunk) (steps.*kUseResults)(completed);
      }
      const RankSet receivers = sent != kNoChunk ? steps.receivers_of(sent) : RankSet{};
      signal_chunks(part, block, sent, receivers, others.empty() ? kNoChunk : used, others);
    }
    return true;
  };
  take_part(args, operation, grid, block, send, receive);
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
