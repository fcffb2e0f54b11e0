// Step 1 of 4: push the routing table and every token's row into the heaps of the ranks that own its experts.
#pragma once

#include "kernels/route.h"
#include "kernels/row.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

struct DispatchSend {
  using Args = DispatchSendArgs;
  static constexpr const char* kName = "dispatch_send";

  // Shared memory: a row sender's staging per group that sends.
  MOE_A2A_HOST_DEVICE static int64_t row_bytes(const Args& args) {
    return args.context.config.row_bytes(args.quantize ? DType::kFloat8 : args.x_dtype);
  }
  MOE_A2A_HOST_DEVICE static int64_t staging_bytes(const Args& args) {
    if (args.block_per_token) return args.quantize ? (row_bytes(args) + 127) / 128 * 128 : 0;
    return staging_that_fits(warp_staging_bytes(row_bytes(args), args.quantize));
  }
  // Warps of a block that send: as many as there is staging for.
  MOE_A2A_HOST_DEVICE static int num_senders(const Args& args) {
    constexpr int64_t kWarps = kBlockThreads / kWarpSize;
    const int64_t fits = staging_bytes(args) > 0 ? static_cast<int64_t>(kMaxSharedBytes) / staging_bytes(args) : kWarps;
    return static_cast<int>(args.block_per_token ? 1 : fits < kWarps ? fits : kWarps);
  }
  static size_t shared_bytes(const Args& args) { return staging_bytes(args) * num_senders(args); }

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte* shared) {
    const uint64_t epoch = args.context.ws.epoch(args.buffer) + 1;
    if (wait_for_credits(args.context, block, args.buffer, epoch)) {
      send_table(args, grid, block, epoch);
      send_rows(args, grid, block, shared, epoch);
    }
    advance_epoch(args.context, args.buffer, grid, block, epoch);
  }

  // The last block of the launch: no other reads the word any more.
  MOE_A2A_DEVICE static void advance_epoch(const Context& c, int buffer, const Grid& grid, const Block& block,
                                           uint64_t epoch) {
    if (last_block_done(grid, block, c.ws.arrivals.at(buffer, Workspace::kDispatchSend))) c.ws.epoch(buffer) = epoch;
  }

  // Nobody reads the previous use of this buffer any more, on any rank, also where no token was exchanged.
  MOE_A2A_DEVICE static bool wait_for_credits(const Context& c, const Block& block, int buffer, uint64_t epoch) {
    bool good = true;
    for (int r = block.rank(); r < c.heap.num_ranks; r += block.size()) {
      const WaitSite site{Operation::kDispatchSend, Phase::kCredit, r};
      good &= wait_for(c.ws.dispatch_credit.at(buffer, r), epoch - 1, site, c.wait, c.heap);
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
      const uint64_t start = trace_now(c.trace());
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
      record(c.trace(), block, {.kind = TraceKind::kRoute, .begin = start, .token = chunk * kTableChunk});
    }
  }

  // A row on its way: where it goes, and whose it is.
  struct Item {
    RankSet members;
    int token = 0;
  };

  // Token t is unit t: the blocks take units in turn, so no group has more than one unit above another.
  MOE_A2A_DEVICE static void send_rows(const Args& args, const Grid& grid, const Block& block, std::byte* shared,
                                       uint64_t epoch) {
    const Context& c = args.context;
    const auto landing_at = [&](const Item& item, int rank) {
      return c.heap.peer(rank, c.ws.row.at(args.buffer, c.heap.rank, item.token));
    };
    if (args.block_per_token) {
      const auto signal = [&](const Item& item) {
        if (block.rank() == 0) signal_row(args, item, epoch);
      };
      PlainRowSender<Block, Item, decltype(landing_at), decltype(signal)> sender(block, landing_at, signal, shared);
      for (int t = grid.rank(); t < args.num_tokens; t += grid.size()) send_row(args, block, sender, t);
      return;
    }
    const int senders = num_senders(args);
    if (block.warp_rank() >= senders) return;
    const Warp warp = block.warp();
    const auto signal = [&](const Item& item) {
      if (warp.rank() == 0) signal_row(args, item, epoch);
    };
    std::byte* staging = staging_bytes(args) > 0 ? shared + block.warp_rank() * staging_bytes(args) : nullptr;
    auto sender = make_warp_sender<Item>(warp, landing_at, signal, staging, row_bytes(args));
    for (int t = grid.rank() + grid.size() * block.warp_rank(); t < args.num_tokens; t += grid.size() * senders) {
      send_row(args, warp, sender, t);
    }
    sender.finish();
  }

  // Pairs with wait_for() in dispatch_recv's receive_rows().
  MOE_A2A_DEVICE static void signal_row(const Args& args, const Item& item, uint64_t epoch) {
    const Context& c = args.context;
    signal_many(c.heap, item.members, c.ws.row_signal.at(args.buffer, c.heap.rank, item.token), epoch, 0, c.trace(),
                item.token);
  }

  // Reads the row once, has it written to each destination; its signal follows when the stores are done.
  template <class Group, class Sender>
  MOE_A2A_DEVICE static void send_row(const Args& args, const Group& group, Sender& sender, int token) {
    const MoeConfig& config = args.context.config;
    const Item item{destinations(args, token), token};
    if (item.members.empty()) return;
    const uint64_t start = trace_now(args.context.trace());
    if (args.quantize) {
      std::byte* staged = sender.open_stage();
      with_element_type(args.x_dtype, [&](auto element) {
        using T = decltype(element);
        quantize_row(group, config, args.vector_rows, reinterpret_cast<const T*>(args.x[token]), staged);
      });
      sender.send_staged(config.row_bytes(DType::kFloat8), item);
    } else {
      const bool has_scales = args.x_dtype == DType::kFloat8;
      sender.send({.values = args.x[token],
                   .num_value_bytes = static_cast<int64_t>(config.hidden) * size_of(args.x_dtype),
                   .scales = has_scales ? args.x_scales[token] : nullptr,
                   .num_scale_bytes = has_scales ? config.num_scales() * int64_t{4} : 0,
                   .scales_offset = config.scales_offset()},
                  item);
    }
    record(args.context.trace(), group, {.kind = TraceKind::kSend, .begin = start, .token = token});
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
