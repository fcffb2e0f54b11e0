// Step 1 of 4: push the routing table and every token's row into the heaps of the ranks that own its experts.
#pragma once

#include "comm/signal_desk.h"
#include "comm/units.h"
#include "moe/route/ll_choice.h"
#include "moe/route/routing_table.h"
#include "rows/ll_stream.h"
#include "rows/quantize.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

struct DispatchSend {
  using Args = DispatchSendArgs;
  static constexpr const char* kName = "dispatch_send";

  // A row on its way.
  struct Item {
    RankSet members;
    int token;
    int turn;  // the rank that is written to first
  };
  using Desk = SignalDesk<Item>;
  static constexpr int kDeskBytes = Desk::shared_bytes();

  // A small batch goes as LL words, choices and rows; a larger one as a table and rows, with signals.
  MOE_A2A_HOST_DEVICE static bool sends_ll(const Args& args) { return args.context.config.sends_ll(args.num_tokens); }
  MOE_A2A_HOST_DEVICE static DType sent_dtype(const Args& args) {
    return args.quantize ? DType::kFloat8 : args.x_dtype;
  }

  MOE_A2A_HOST_DEVICE static StagedFor staged_for(const Args& args) {
    return args.quantize ? StagedFor::kQuantizing : StagedFor::kSending;
  }

  // Shared memory: per warp that sends, what a row sender or a quantised piece takes; the table has the same memory
  // before.
  MOE_A2A_HOST_DEVICE static int staging_bytes(const Args& args) {
    const MoeConfig& config = args.context.config;
    if (!sends_ll(args)) {
      return staging_that_fits(args.context, warp_staging_bytes(config.row_bytes(sent_dtype(args)), staged_for(args)),
                               kDeskBytes);
    }
    constexpr int kLength = MoeConfig::piece_length();
    return args.quantize ? (kLength + kLength / kScaleBlock * 4 + 127) / 128 * 128 : 0;
  }
  // Warps of a block that send: as many as there is staging for.
  MOE_A2A_HOST_DEVICE static int num_senders(const Args& args) {
    if (sends_ll(args)) return warps_with_staging(args.context, staging_bytes(args));
    return Desk::num_senders(warps_with_staging(args.context, staging_bytes(args), kDeskBytes));
  }
  static size_t shared_bytes(const Args& args) {
    const size_t rows = kDeskBytes + staging_bytes(args) * num_senders(args);
    const size_t table = RoutingTable::shared_bytes(args.context.config);
    return rows > table ? rows : table;
  }

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte* shared) {
    const uint64_t epoch = args.context.ws.epoch(args.buffer) + 1;
    prefetch_first_unit(args, grid, block);
    if (wait_for_credits(args.context, block, args.buffer, epoch)) {
      if (sends_ll(args)) {
        send_small_batch(args, grid, block, shared, epoch);
      } else {
        RoutingTable(args, block, shared).send(grid, epoch);
        block.sync();  // the table's memory is the rows' now
        send_whole_rows(args, grid, block, shared, epoch);
      }
    }
    advance_epoch(args.context, args.buffer, grid, block, epoch);
  }

  // The last block of the launch: no other reads the word any more.
  MOE_A2A_DEVICE static void advance_epoch(const Context& c, int buffer, const Grid& grid, const Block& block,
                                           uint64_t epoch) {
    if (last_block_done(grid, block, c.ws, buffer, Workspace::kDispatchSend)) c.ws.epoch(buffer) = epoch;
  }

  // For launches that do not hand out tickets: this block has read the epoch, and needs nothing else of it. A thread
  // that has hardly anything else to do counts the block, while the others go on.
  MOE_A2A_DEVICE static void advance_epoch_early(const Context& c, int buffer, const Grid& grid, const Block& block,
                                                 uint64_t epoch) {
    if (block.rank() != block.size() / 2) return;
    if (count_block(grid, c.ws, buffer, Workspace::kDispatchSend)) c.ws.epoch(buffer) = epoch;
  }

  // Nobody reads the previous use of this buffer any more, on any rank, also where no token was exchanged.
  MOE_A2A_DEVICE static bool wait_for_credits(const Context& c, const Block& block, int buffer, uint64_t epoch) {
    bool good = true;
    for (int r = block.rank(); r < c.heap.num_ranks; r += block.size()) {
      const WaitSite site{moe_op::kDispatchSend, moe_kind::kCreditWait, r};
      good &= wait_for(c.ws.dispatch_credit.at(buffer, r), epoch - 1, site, c.wait, c.heap);
    }
    return !block.any(!good);
  }

  MOE_A2A_DEVICE static void send_whole_rows(const Args& args, const Grid& grid, const Block& block, std::byte* shared,
                                             uint64_t epoch) {
    const Context& c = args.context;
    const auto tell = [&](const Item& item) {
      signal_token(c.heap, item.members, signal_of(args, item), epoch, c.trace(), item.token);
    };
    send_and_tell<Item>(block, shared, num_senders(args), tell,
                        [&](const auto& done) { send_rows_of_warp(args, grid, block, shared, done); });
  }

  template <class Done>
  MOE_A2A_DEVICE static void send_rows_of_warp(const Args& args, const Grid& grid, const Block& block,
                                               std::byte* shared, const Done& done) {
    const Context& c = args.context;
    const Warp warp = block.warp();
    const auto landing_at = [&](const Item& item, int rank) { return landing(args, item, rank); };
    std::byte* staging =
        staging_bytes(args) > 0 ? shared + kDeskBytes + block.warp_rank() * staging_bytes(args) : nullptr;
    auto sender = make_warp_sender<Item>(warp, landing_at, done, staging, c.config.row_bytes(sent_dtype(args)));
    const Piece whole{0, c.config.hidden};
    uint32_t* ticket = c.ws.tickets.at(args.buffer, Workspace::kDispatchSend);
    for (Units units(grid, block, num_senders(args), ticket); units.current() < args.num_tokens; units.advance()) {
      const Item item = item_of(args, warp, units.current());
      if (item.members.empty()) continue;
      const uint64_t start = trace_now();
      if (args.quantize) {
        std::byte* staged = sender.open_stage();
        sender.send_staged(quantized(args, warp, whole, item, staged), item);
      } else {
        sender.send(row_source(args, whole, item), item);
      }
      record(c.trace(), warp, {.kind = TraceKind::kSend, .begin = start, .token = item.token});
    }
    sender.finish();
  }

  // ---- small batches

  // The choices of all tokens and behind them the pieces of their rows are units of work on one line, along which the
  // warps go side by side.
  MOE_A2A_DEVICE static void send_small_batch(const Args& args, const Grid& grid, const Block& block, std::byte* shared,
                                              uint64_t epoch) {
    const Warp warp = block.warp();
    const int pieces = args.context.config.num_pieces(), num_units = args.num_tokens * (pieces + 1);
    const int num_warps = num_senders(args);
    // By threads that have hardly anything else to do.
    const bool is_last = grid.rank() == grid.size() - 1;
    if (is_last && block.rank() == block.size() - 1) announce(args, epoch);
    if (is_last && args.num_tokens == 0 && block.rank() == 0) {
      send_choice(args.context, args.buffer, 0, 0, 0, -1, 0, epoch);
    }
    if (block.warp_rank() >= num_warps) return;
    std::byte* staging = shared + block.warp_rank() * staging_bytes(args);
    for (int unit = grid.rank() + grid.size() * block.warp_rank(); unit < num_units; unit += grid.size() * num_warps) {
      const int piece = unit - args.num_tokens;
      if (piece < 0) {
        send_choices(args, warp, unit, epoch);
      } else {
        send_piece(args, warp, piece / pieces, piece % pieces, staging, epoch);
      }
    }
  }

  // For what came before on this rank: it no longer reads the sums of the combine before. Pairs with wait_for() in
  // dispatch_recv's see_announcements(). The choices say the same sooner, but nothing of what came before them.
  MOE_A2A_DEVICE static void announce(const Args& args, uint64_t epoch) {
    const Context& c = args.context;
    signal_many(c.heap, RankSet::all(c.heap.num_ranks), c.ws.table_signal.at(args.buffer, c.heap.rank, 0), epoch,
                static_cast<uint32_t>(args.num_tokens));
  }

  MOE_A2A_DEVICE static void send_choices(const Args& args, const Warp& warp, int token, uint64_t epoch) {
    const Context& c = args.context;
    const int num_topk = c.config.num_topk;
    RankSet ranks;
    for (int k = warp.rank(); k < num_topk; k += warp.size()) {
      const int32_t expert = checked_choice(args, token, k);
      const float weight = args.topk_weights != nullptr ? args.topk_weights[int64_t{token} * num_topk + k] : 1.0f;
      send_choice(c, args.buffer, args.num_tokens, token, k, expert, weight, epoch);
      if (expert >= 0) ranks.insert(rank_of_expert(c.config, expert));
    }
    ranks.bits = warp.union_of(ranks.bits);
    if (warp.rank() == 0) c.ws.token_ranks(args.buffer, token) = ranks;
  }

  // Taken by receive_piece() in dispatch_recv. (Own pieces put to their place at once, without words, were 1 us faster
  // with 128 tokens, 0.5 us slower with 8.)
  MOE_A2A_DEVICE static void send_piece(const Args& args, const Warp& warp, int token, int number, std::byte* staging,
                                        uint64_t epoch) {
    const Context& c = args.context;
    const Item item = item_of(args, warp, token);
    if (item.members.empty()) return;
    const Piece piece = Piece::of(c.config, number);
    warp.sync();  // the piece before has been read by all lanes before any writes this one in its place
    const RowSource row = args.quantize ? quantized(args, warp, piece, item, staging) : row_source(args, piece, item);
    warp.sync();  // a quantised piece is complete before any lane sends a part of it
    LlWord* local = ll_words_at(c.ws.ll_row, args.buffer, c.heap.rank, token,
                                number * ll_words_of_piece(c.config, sent_dtype(args)));
    const uint64_t start = trace_now();
    send_ll(warp, item.members, item.turn, row, epoch, [&](int rank) { return c.heap.peer(rank, local); });
    record_send_ll(c.trace(), warp, item.members, token, start);
  }

  // What a sender's first unit reads, asked for while the credits are looked at.
  MOE_A2A_DEVICE static void prefetch_first_unit(const Args& args, const Grid& grid, const Block& block) {
    const int pieces = args.context.config.num_pieces(), num_topk = args.context.config.num_topk;
    const int unit = grid.rank() + grid.size() * block.warp_rank();
    if (!sends_ll(args) || unit >= args.num_tokens * (pieces + 1)) return;
    const Warp warp = block.warp();
    const int number = unit - args.num_tokens, token = number < 0 ? unit : number / pieces;
    if (warp.rank() == 0) prefetch(args.topk_idx.at(int64_t{token} * num_topk));
    if (number < 0) {
      if (warp.rank() == 0 && args.topk_weights != nullptr) prefetch(args.topk_weights + int64_t{token} * num_topk);
      return;
    }
    constexpr int kLine = 128;
    const Piece piece = Piece::of(args.context.config, number % pieces);
    const int64_t element = size_of(args.x_dtype);
    const std::byte* values = args.x[token] + piece.first * element;
    for (int64_t i = warp.rank() * kLine; i < piece.size() * element; i += warp.size() * kLine) prefetch(values + i);
  }

  // ---- rows

  MOE_A2A_DEVICE static Item item_of(const Args& args, const Warp& warp, int token) {
    const HeapView& heap = args.context.heap;
    return {destinations(warp, args, token), token, (heap.rank + 1 + token) % heap.num_ranks};
  }
  MOE_A2A_DEVICE static std::byte* landing(const Args& args, const Item& item, int rank) {
    const Context& c = args.context;
    return c.heap.peer(rank, c.ws.row.at(args.buffer, c.heap.rank, item.token));
  }
  // Pairs with wait_for() in dispatch_recv's receive_rows().
  MOE_A2A_DEVICE static Signal* signal_of(const Args& args, const Item& item) {
    return args.context.ws.row_signal.at(args.buffer, args.context.heap.rank, item.token);
  }

  // Where a piece lies, and where in the row it lands.
  MOE_A2A_DEVICE static RowSource row_source(const Args& args, const Piece& piece, const Item& item) {
    RowSource row = part_of_row(args.context.config, sent_dtype(args), piece);
    row.values = args.x[item.token] + row.values_offset;
    if (row.num_scale_bytes > 0 && !args.quantize) {
      row.scales = args.x_scales[item.token] + piece.first / kScaleBlock * int64_t{sizeof(float)};
    }
    return row;
  }

  // The same, put together in `staged` by the warp: the scales as far behind the values as in a whole row.
  MOE_A2A_DEVICE static RowSource quantized(const Args& args, const Warp& warp, const Piece& piece, const Item& item,
                                            std::byte* staged) {
    std::byte* scales = staged + (piece.size() + 15) / 16 * 16;
    with_element_type(args.x_dtype, [&](auto type) {
      using T = decltype(type);
      quantize_piece(warp, piece, args.vector_rows, reinterpret_cast<const T*>(args.x[item.token]),
                     reinterpret_cast<Float8*>(staged), reinterpret_cast<float*>(scales));
    });
    RowSource row = row_source(args, piece, item);
    row.values = staged;
    row.scales = scales;
    row.in_shared = true;
    return row;
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
