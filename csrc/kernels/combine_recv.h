// Step 4 of 4: of each of this rank's tokens, wait for the sums of the ranks that worked on it and add them up.
#pragma once

#include "kernels/route.h"
#include "kernels/row.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

struct CombineRecv {
  using Args = CombineRecvArgs;
  static constexpr const char* kName = "combine_recv";

  // Shared memory: the terms of one sum per group.
  MOE_A2A_HOST_DEVICE static size_t group_bytes(const Args& args) {
    return Terms<float>::bytes(args.context.config.num_ranks);
  }
  static size_t shared_bytes(const Args& args) { return group_bytes(args) * (kBlockThreads / kWarpSize); }

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte* shared) {
    receive(args, grid, block, shared, args.context.ws.epoch(args.buffer));
  }

  MOE_A2A_DEVICE static void receive(const Args& args, const Grid& grid, const Block& block, std::byte* shared,
                                     uint64_t epoch) {
    if (args.block_per_token) {
      for (int t = grid.rank(); t < args.num_tokens; t += grid.size()) {
        if (!receive_token(args, block, shared, t, epoch)) return;
      }
      return;
    }
    std::byte* memory = shared + block.warp_rank() * group_bytes(args);
    for (int t = grid.rank() + grid.size() * block.warp_rank(); t < args.num_tokens;
         t += grid.size() * block.num_warps()) {
      if (!receive_token(args, block.warp(), memory, t, epoch)) return;
    }
  }

  // Ranks in ascending order: the order of addition is part of the contract.
  template <class Group>
  MOE_A2A_DEVICE static bool receive_token(const Args& args, const Group& group, std::byte* memory, int token,
                                           uint64_t epoch) {
    const Context& c = args.context;
    const int me = c.heap.rank;
    const RankSet ranks = destinations(c.config, c.ws.table_idx.at(args.buffer, me, token));
    bool good = true;
    for (int r = group.rank(); r < c.heap.num_ranks; r += group.size()) {
      if (!ranks.contains(r)) continue;
      const WaitSite site{Operation::kCombineRecv, Phase::kPartialSum, r, token, args.buffer};
      good &= wait_for(c.ws.combine_signal.at(args.buffer, r, token), epoch, site, c.wait, c.heap, nullptr,
                       c.ws.combine_refusal.at(args.buffer, r), args.attempt);
    }
    if (group.any(!good)) return false;  // also what lets the other threads read what the waiting ones have acquired
    const uint64_t start = trace_now(c.trace());
    with_element_type(c.config.dtype, [&](auto element) {
      using T = decltype(element);
      const auto sum_of = [&](int r) -> const T* {
        return ranks.contains(r) ? reinterpret_cast<const T*>(c.ws.combine_row.at(args.buffer, r, token)) : nullptr;
      };
      const Terms<T> terms = make_terms<T>(group, memory, c.heap.num_ranks, sum_of, [](int) { return 1.0f; });
      T* target = reinterpret_cast<T*>(args.combined_x) + static_cast<int64_t>(token) * c.config.hidden;
      add_rows(group, c.config.hidden, args.vector_rows, terms, target);
    });
    record(c.trace(), group, {.kind = TraceKind::kReduce, .begin = start, .token = token});
    return true;
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
