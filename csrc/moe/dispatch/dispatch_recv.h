// Step 2 of 4: take the routing tables, write the expert lists while rows fly, then see every row land.
#pragma once

#include "moe/route/expert_lists.h"
#include "rows/ll_stream.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

struct DispatchRecv {
  using Args = DispatchRecvArgs;
  static constexpr const char* kName = "dispatch_recv";

  // Shared memory: every warp's number of tokens of each rank, then the lists.
  MOE_A2A_HOST_DEVICE static size_t header_bytes(const MoeConfig& config) {
    return (kBlockThreads / kWarpSize * config.num_ranks * sizeof(int32_t) + 127) / 128 * 128;
  }
  static size_t shared_bytes(const Args& args) {
    return header_bytes(args.context.config) + ExpertLists::shared_bytes(args.context.config);
  }

  // The first blocks write the lists while the others see to the rows; a single one does both.
  struct Shares {
    Grid lists, rows;

    MOE_A2A_DEVICE bool writes_lists() const { return lists.rank() < lists.size(); }
    MOE_A2A_DEVICE bool sees_rows() const { return rows.rank() >= 0; }
  };
  MOE_A2A_DEVICE static Shares shares(const Grid& grid) {
    if (grid.size() == 1) return {grid, grid};
    const int half = grid.size() / 2, writers = ExpertLists::kBlocksOfUse < half ? ExpertLists::kBlocksOfUse : half;
    return {Grid{grid.rank(), writers}, Grid{grid.rank() - writers, grid.size() - writers}};
  }

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte* shared) {
    receive(args, shares(grid), block, shared, args.context.ws.epoch(args.buffer));
  }

  MOE_A2A_DEVICE static void receive(const Args& args, const Shares& shares, const Block& block, std::byte* shared,
                                     uint64_t epoch) {
    const MoeConfig& config = args.context.config;
    int32_t* num_tokens = reinterpret_cast<int32_t*>(shared) + block.warp_rank() * config.num_ranks;
    const auto headers = [&] { return receive_headers(args, block.warp(), num_tokens, epoch); };
    if (shares.writes_lists()) {
      const uint64_t start = trace_now();
      ExpertLists lists(args, shares.lists, block, shared + header_bytes(config), num_tokens);
      if (!lists.build(epoch, headers)) return;
      record(args.context.trace(), block, {.kind = moe_kind::kLists, .begin = start});
    }
    if (shares.sees_rows() && headers()) {
      receive_small_batches(args, shares.rows, block, num_tokens, epoch);
      receive_rows(args, shares.rows, block, num_tokens, epoch);
      see_announcements(args, block, num_tokens, epoch);
    }
  }

  // How many tokens each rank has sent, in num_tokens [num_ranks] of the warp. A rank that refused brings none.
  MOE_A2A_DEVICE static bool receive_headers(const Args& args, const Warp& warp, int32_t* num_tokens, uint64_t epoch) {
    const Context& c = args.context;
    bool good = true;
    for (int r = warp.rank(); r < c.heap.num_ranks; r += warp.size()) {
      uint32_t payload = 0;
      const WaitSite site{moe_op::kDispatchRecv, moe_kind::kTableWait, r, -1, args.buffer};
      const Signal* signal = c.ws.table_signal.at(args.buffer, r, 0);
      good &= wait_until(epoch, site, c.wait, c.heap, {}, [&](uint64_t& seen) {
        return has_ll_tokens(args, r, epoch, &payload) || has_arrived(signal, epoch, seen, &payload);
      });
      if (payload == Workspace::kRefused) {
        write_report(c.wait, c.heap, site, Reason::kRefused, Refusal::kFinal, epoch, Signal::pack(epoch, payload), 0);
        payload = 0;
      }
      num_tokens[r] = static_cast<int32_t>(payload);
    }
    return !warp.any(!good);  // also what lets all lanes read num_tokens
  }
  MOE_A2A_DEVICE static bool has_ll_tokens(const Args& args, int rank, uint64_t epoch, uint32_t* num_tokens) {
    return args.context.config.num_max_ll_tokens > 0 &&
           find_ll_tokens(args.context, args.buffer, rank, epoch, num_tokens);
  }

  // The rows of all large batches lie on one line, along which the threads go side by side. A token of which no expert
  // lives here sends no row.
  MOE_A2A_DEVICE static void receive_rows(const Args& args, const Grid& grid, const Block& block,
                                          const int32_t* num_tokens, uint64_t epoch) {
    const Context& c = args.context;
    const int64_t stride = int64_t{grid.size()} * block.size();
    int64_t token = int64_t{grid.rank()} * block.size() + block.rank();
    for (int r = 0; r < c.heap.num_ranks; ++r) {
      if (c.config.sends_ll(num_tokens[r])) continue;
      for (; token < num_tokens[r]; token += stride) {
        const int chunk = static_cast<int>(token) / chunk_length(num_tokens[r]);
        if (chunk > 0 && !receive_chunk(args, r, chunk, num_tokens[r], epoch)) return;
        if (c.ws.table_landing(args.buffer, r, token) < 0) continue;
        const WaitSite site{moe_op::kDispatchRecv, moe_kind::kRowWait, r, static_cast<int>(token)};
        if (!wait_for(c.ws.row_signal.at(args.buffer, r, token), epoch, site, c.wait, c.heap)) return;
      }
      token -= num_tokens[r];  // on the next rank's part of the line
    }
  }

  // ---- small batches

  // Their rows come in pieces, which lie on a line too; a warp takes each from its LL words to its place in recv_x.
  MOE_A2A_DEVICE static void receive_small_batches(const Args& args, const Grid& grid, const Block& block,
                                                   const int32_t* num_tokens, uint64_t epoch) {
    const MoeConfig& config = args.context.config;
    const int stride = grid.size() * block.num_warps(), pieces = config.num_pieces();
    // From the last warp on: the first ones may still be sending.
    int unit = grid.rank() + grid.size() * (block.num_warps() - 1 - block.warp_rank());
    for (int r = 0; r < config.num_ranks; ++r) {
      if (!config.sends_ll(num_tokens[r])) continue;
      const int num_units = num_tokens[r] * pieces;
      for (; unit < num_units; unit += stride) {
        if (!receive_piece(args, block.warp(), r, unit / pieces, unit % pieces, epoch)) return;
      }
      unit -= num_units;
    }
  }

  // The signals that go with small batches: who has seen one may write where the rank read its sums before.
  MOE_A2A_DEVICE static void see_announcements(const Args& args, const Block& block, const int32_t* num_tokens,
                                               uint64_t epoch) {
    const Context& c = args.context;
    for (int r = block.rank(); r < c.heap.num_ranks; r += block.size()) {
      const WaitSite site{moe_op::kDispatchRecv, moe_kind::kTableWait, r};
      if (c.config.sends_ll(num_tokens[r])) {
        wait_for(c.ws.table_signal.at(args.buffer, r, 0), epoch, site, c.wait, c.heap);
      }
    }
  }

  // Whether an expert of the token lives here is for its choices to say.
  MOE_A2A_DEVICE static bool receive_piece(const Args& args, const Warp& warp, int rank, int token, int number,
                                           uint64_t epoch) {
    const Context& c = args.context;
    bool good = true, lands = false;
    for (int k = warp.rank(); k < c.config.num_topk; k += warp.size()) {
      int expert;
      float weight;
      good &= receive_choice(c, args.buffer, rank, token, k, epoch, k == 0, &expert, &weight);
      lands |= expert >= 0;
    }
    if (warp.any(!good)) return false;
    if (!warp.any(lands)) return true;
    const LlWord* words =
        ll_words_at(c.ws.ll_row, args.buffer, rank, token, number * ll_words_of_piece(c.config, args.row_dtype));
    good = receive_ll(warp, c, words, part_of_row(c.config, args.row_dtype, Piece::of(c.config, number)),
                      c.ws.row.at(args.buffer, rank, token), epoch,
                      {moe_op::kDispatchRecv, moe_kind::kRowWait, rank, token});
    return !warp.any(!good);
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
