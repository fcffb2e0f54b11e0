// Step 1 of 4: push the routing table and every token's row into the heaps of the ranks that own its experts.
#pragma once

#include "kernels/route.h"
#include "kernels/row.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

struct DispatchSend {
  using Args = DispatchSendArgs;
  static constexpr const char* kName = "dispatch_send";

  // Shared memory: one staged float8 row per group that quantises.
  MOE_A2A_HOST_DEVICE static size_t staging_bytes(const Args& args) {
    return args.quantize ? static_cast<size_t>(args.context.config.row_stride(DType::kFloat8)) : 0;
  }
  MOE_A2A_HOST_DEVICE static int num_staging_groups(const Args& args) {
    if (args.block_per_token) return 1;
    const size_t fits = args.quantize ? kMaxSharedBytes / staging_bytes(args) : kBlockThreads;
    constexpr int kWarps = kBlockThreads / kWarpSize;
    return fits < kWarps ? static_cast<int>(fits) : kWarps;
  }
  static size_t shared_bytes(const Args& args) { return staging_bytes(args) * num_staging_groups(args); }

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte* shared) {
    const Context& c = args.context;
    const uint64_t epoch = c.ws.epoch(args.buffer) + 1;
    if (wait_for_credits(c, block, args.buffer, epoch, Operation::kDispatchSend)) {
      send_table(args, grid, block, epoch);
      send_rows(args, grid, block, shared, epoch);
    }
    if (last_block_done(grid, block, c.ws.arrivals.at(args.buffer, Workspace::kDispatchSend)) && block.rank() == 0) {
      c.ws.epoch(args.buffer) = epoch;
    }
  }

  // Nobody reads the previous use of this buffer any more, on any rank, also where no token was exchanged.
  MOE_A2A_DEVICE static bool wait_for_credits(const Context& c, const Block& block, int buffer, uint64_t epoch,
                                              Operation operation) {
    bool good = true;
    for (int r = block.rank(); r < c.heap.num_ranks; r += block.size()) {
      good &= wait_for(c.ws.dispatch_credit.at(buffer, r), epoch - 1, {operation, Phase::kCredit, r}, c.wait, c.heap);
    }
    return !block.any(!good);
  }

  // The whole table goes to every rank, early and in chunks, so that receivers build their lists while rows fly.
  MOE_A2A_DEVICE static void send_table(const Args& args, const Grid& grid, const Block& block, uint64_t epoch) {
    const Context& c = args.context;
    const int num_topk = c.config.num_topk, me = c.heap.rank;
    const RankSet all = RankSet::all(c.heap.num_ranks);
    const int num_chunks = args.num_tokens == 0 ? 1 : (args.num_tokens + kTableChunk - 1) / kTableChunk;
    for (int chunk = grid.rank(); chunk < num_chunks; chunk += grid.size()) {
      const int begin = chunk * kTableChunk * num_topk;
      const int rest = args.num_tokens * num_topk - begin;
      const int count = rest < kTableChunk * num_topk ? rest : kTableChunk * num_topk;
      int32_t* idx = c.ws.table_idx.at(args.buffer, me);
      float* weight = c.ws.table_weight.at(args.buffer, me);
      for (int i = begin + block.rank(); i < begin + count; i += block.size()) {
        const int32_t choice = checked_choice(args, i / num_topk, i % num_topk);
        const float w = args.topk_weights != nullptr ? args.topk_weights[i] : 1.0f;
        for (RankSet rest = all; !rest.empty(); rest.remove_first()) {
          *c.heap.peer(rest.first(), idx + i) = choice;
          *c.heap.peer(rest.first(), weight + i) = w;
        }
      }
      block.release_sync();
      if (block.rank() == 0) {
        // Pairs with wait_for() in dispatch_recv's receive_tables().
        const uint32_t payload = chunk == 0 ? static_cast<uint32_t>(args.num_tokens) : 0;
        signal_many(c.heap, all, c.ws.table_signal.at(args.buffer, me, chunk), epoch, payload);
      }
    }
  }

  // Token t is unit t: the blocks take units in turn, so no group has more than one unit above another.
  MOE_A2A_DEVICE static void send_rows(const Args& args, const Grid& grid, const Block& block, std::byte* shared,
                                       uint64_t epoch) {
    if (args.block_per_token) {
      for (int t = grid.rank(); t < args.num_tokens; t += grid.size()) send_row(args, block, t, shared, epoch);
      return;
    }
    const int groups = num_staging_groups(args);
    if (block.warp_rank() >= groups) return;
    std::byte* staged = shared + block.warp_rank() * staging_bytes(args);
    for (int t = grid.rank() + grid.size() * block.warp_rank(); t < args.num_tokens; t += grid.size() * groups) {
      send_row(args, block.warp(), t, staged, epoch);
    }
  }

  // Reads the row once, writes it to each destination, then raises its signal on all of them.
  template <class Group>
  MOE_A2A_DEVICE static void send_row(const Args& args, const Group& group, int token, std::byte* staged,
                                      uint64_t epoch) {
    const Context& c = args.context;
    const int me = c.heap.rank;
    const RankSet ranks = destinations(args, token);
    if (ranks.empty()) return;
    std::byte* landing = c.ws.row.at(args.buffer, me, token);
    const auto landing_at = [&](int rank) { return c.heap.peer(rank, landing); };
    if (args.quantize) {
      with_element_type(args.x_dtype, [&](auto element) {
        quantize_row(group, c.config, reinterpret_cast<const decltype(element)*>(args.x[token]), staged);
      });
      group.sync();  // the staged row is complete before any thread sends a part of it
      multicast_bytes(group, ranks, landing_at, staged, c.config.row_bytes(DType::kFloat8));
    } else {
      const int64_t bytes = static_cast<int64_t>(c.config.hidden) * size_of(args.x_dtype);
      multicast_bytes(group, ranks, landing_at, args.x[token], bytes);
      if (args.x_dtype == DType::kFloat8) {
        const auto scales_at = [&](int rank) { return c.heap.peer(rank, landing + c.config.scales_offset()); };
        multicast_bytes(group, ranks, scales_at, args.x_scales[token], c.config.num_scales() * sizeof(float));
      }
    }
    group.release_sync();  // also: nobody overwrites the staged row before all have sent it
    if (group.rank() == 0) {
      // Pairs with wait_for() in dispatch_recv's receive_rows().
      signal_many(c.heap, ranks, c.ws.row_signal.at(args.buffer, me, token), epoch);
    }
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
