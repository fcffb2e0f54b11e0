// Step 1 of 4: push the routing table and every token's row into the heaps of the ranks that own its experts.
#pragma once

#include "kernels/outbox.h"
#include "kernels/routing_table.h"
#include "kernels/row.h"
#include "kernels/units.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

struct DispatchSend {
  using Args = DispatchSendArgs;
  static constexpr const char* kName = "dispatch_send";

  using Item = SentPiece;
  static constexpr size_t kOutboxBytes = Outbox<Item, int>::shared_bytes();

  MOE_A2A_HOST_DEVICE static int num_pieces(const Args& args) {
    return args.context.config.num_pieces(args.num_tokens);
  }
  MOE_A2A_HOST_DEVICE static DType sent_dtype(const Args& args) {
    return args.quantize ? DType::kFloat8 : args.x_dtype;
  }

  MOE_A2A_HOST_DEVICE static StagedFor staged_for(const Args& args) {
    return args.quantize ? StagedFor::kQuantizing : StagedFor::kSending;
  }

  // Shared memory: a row sender's staging per warp that sends; the table takes the same memory before.
  MOE_A2A_HOST_DEVICE static int64_t staging_bytes(const Args& args) {
    const Context& c = args.context;
    if (num_pieces(args) == 1) {
      return staging_that_fits(c, warp_staging_bytes(c.config.row_bytes(sent_dtype(args)), staged_for(args)));
    }
    const int length = c.config.piece_length(num_pieces(args));
    return args.quantize ? (length + length / kScaleBlock * int64_t{sizeof(float)} + 127) / 128 * 128 : 0;
  }
  // Warps of a block that send: as many as there is staging for.
  MOE_A2A_HOST_DEVICE static int num_senders(const Args& args) {
    return warps_with_staging(args.context, staging_bytes(args), num_pieces(args) == 1 ? 0 : kOutboxBytes);
  }
  static size_t shared_bytes(const Args& args) {
    const size_t outbox = num_pieces(args) == 1 ? 0 : kOutboxBytes;
    const size_t rows = outbox + staging_bytes(args) * num_senders(args);
    const size_t table = RoutingTable::shared_bytes(args.context.config);
    return rows > table ? rows : table;
  }

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte* shared) {
    const uint64_t epoch = args.context.ws.epoch(args.buffer) + 1;
    prefetch_first_unit(args, grid, block);
    if (wait_for_credits(args.context, block, args.buffer, epoch)) {
      RoutingTable(args, block, shared).send(grid, epoch);
      block.sync();  // the table's memory is the rows' now
      send_rows(args, grid, block, shared, epoch);
    }
    advance_epoch(args.context, args.buffer, grid, block, epoch);
  }

  // The last block of the launch: no other reads the word any more.
  MOE_A2A_DEVICE static void advance_epoch(const Context& c, int buffer, const Grid& grid, const Block& block,
                                           uint64_t epoch) {
    if (last_block_done(grid, block, c.ws, buffer, Workspace::kDispatchSend)) c.ws.epoch(buffer) = epoch;
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

  // The pieces of all rows lie on one line and the warps take units in turn, so none has more than one above another.
  MOE_A2A_DEVICE static void send_rows(const Args& args, const Grid& grid, const Block& block, std::byte* shared,
                                       uint64_t epoch) {
    if (num_pieces(args) == 1) {
      send_whole_rows(args, grid, block, shared, epoch);
    } else {
      send_pieces(args, grid, block, shared, epoch);
    }
  }

  MOE_A2A_DEVICE static void send_whole_rows(const Args& args, const Grid& grid, const Block& block, std::byte* shared,
                                             uint64_t epoch) {
    const Context& c = args.context;
    const int num_warps = num_senders(args);
    if (block.warp_rank() >= num_warps) return;
    const Warp warp = block.warp();
    const auto landing_at = [&](const Item& item, int rank) { return landing(args, item, rank); };
    const auto signal = [&](const Item& item) {
      signal_many(c.heap, item.members, signal_of(args, item), epoch, 0, c.trace(), item.token);
    };
    std::byte* staging = staging_bytes(args) > 0 ? shared + block.warp_rank() * staging_bytes(args) : nullptr;
    auto sender = make_warp_sender<Item>(warp, landing_at, signal, staging, c.config.row_bytes(sent_dtype(args)),
                                         staged_for(args));
    const Piece whole{0, c.config.hidden};
    uint32_t* ticket = c.ws.tickets.at(args.buffer, Workspace::kDispatchSend);
    for (Units units(grid, block, num_warps, ticket); units.current() < args.num_tokens; units.advance()) {
      const Item item = item_of(args, warp, units.current(), units.current());
      if (item.members.empty()) continue;
      const uint64_t start = trace_now(c.trace());
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

  MOE_A2A_DEVICE static void send_pieces(const Args& args, const Grid& grid, const Block& block, std::byte* shared,
                                         uint64_t epoch) {
    const Warp warp = block.warp();
    const auto signal = [&](const Item& item) { return signal_of(args, item); };
    Outbox<Item, decltype(signal)> outbox(args.context, block, shared, epoch, signal);
    std::byte* staging = shared + kOutboxBytes + block.warp_rank() * staging_bytes(args);
    const int pieces = num_pieces(args), num_units = args.num_tokens * pieces, num_warps = num_senders(args);
    uint32_t* ticket = args.context.ws.tickets.at(args.buffer, Workspace::kDispatchSend);
    if (block.warp_rank() < num_warps) {  // the others draw no ticket, but meet these in post()
      for (Units units(grid, block, num_warps, ticket); units.current() < num_units; units.advance()) {
        const int token = units.current() / pieces, number = units.current() % pieces;
        const Item item = item_of(args, warp, token, units.current());
        if (item.members.empty()) continue;
        const uint64_t start = trace_now(args.context.trace());
        send_piece(args, warp, Piece::of(args.context.config, pieces, number), item, staging);
        record(args.context.trace(), warp, {.kind = TraceKind::kSend, .begin = start, .token = token});
        outbox.add(item);
      }
    }
    outbox.post();
  }

  MOE_A2A_DEVICE static void send_piece(const Args& args, const Warp& warp, const Piece& piece, const Item& item,
                                        std::byte* staging) {
    warp.sync();  // the piece before has been read by all lanes before any writes this one in its place
    const RowSource row = args.quantize ? quantized(args, warp, piece, item, staging) : row_source(args, piece, item);
    warp.sync();  // a quantised piece is complete before any lane sends a part of it
    multicast_row(warp, row, item.members, item.turn, [&](int rank) { return landing(args, item, rank); });
  }

  // What a sender's first unit reads, asked for while the credits are looked at.
  MOE_A2A_DEVICE static void prefetch_first_unit(const Args& args, const Grid& grid, const Block& block) {
    constexpr int kLine = 128;
    const int pieces = num_pieces(args), unit = grid.rank() + grid.size() * block.warp_rank();
    if (pieces == 1 || unit >= args.num_tokens * pieces) return;
    const Piece piece = Piece::of(args.context.config, pieces, unit % pieces);
    const int64_t element = size_of(args.x_dtype);
    const std::byte* values = args.x[unit / pieces] + piece.first * element;
    const Warp warp = block.warp();
    for (int64_t i = warp.rank() * kLine; i < piece.size() * element; i += warp.size() * kLine) prefetch(values + i);
  }

  MOE_A2A_DEVICE static Item item_of(const Args& args, const Warp& warp, int token, int unit) {
    const HeapView& heap = args.context.heap;
    return {destinations(warp, args, token), token, (heap.rank + 1 + token) % heap.num_ranks, unit};
  }
  MOE_A2A_DEVICE static std::byte* landing(const Args& args, const Item& item, int rank) {
    const Context& c = args.context;
    return c.heap.peer(rank, c.ws.row.at(args.buffer, c.heap.rank, item.token));
  }
  // Pairs with wait_for() in dispatch_recv's receive_rows().
  MOE_A2A_DEVICE static Signal* signal_of(const Args& args, const Item& item) {
    return args.context.ws.row_signal.at(args.buffer, args.context.heap.rank, item.unit);
  }

  // Where a piece lies, and where in the row it lands.
  MOE_A2A_DEVICE static RowSource row_source(const Args& args, const Piece& piece, const Item& item) {
    const MoeConfig& config = args.context.config;
    const int64_t element = size_of(sent_dtype(args)), first_scale = piece.first / kScaleBlock * int64_t{sizeof(float)};
    RowSource row{.values = args.x[item.token] + piece.first * element,
                  .num_value_bytes = piece.size() * element,
                  .values_offset = piece.first * element};
    if (sent_dtype(args) == DType::kFloat8) {
      row.num_scale_bytes = (piece.size() + kScaleBlock - 1) / kScaleBlock * int64_t{sizeof(float)};
      row.scales_offset = config.scales_offset() + first_scale;
      if (!args.quantize) row.scales = args.x_scales[item.token] + first_scale;
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
    return row;
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
