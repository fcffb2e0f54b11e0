// Step 1 of 4: push the routing and every token's row into the heaps of the ranks that own its experts. How they travel
// depends on the batch's kind (wires.h).
#pragma once

#include "moe/route/ll_choice.h"
#include "moe/route/routing_table.h"
#include "moe/wires.h"
#include "rows/quantize.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// Schedule: the tokens in order, each starting at a different rank.
struct TokenSchedule {
  static constexpr bool kIsToOneRank = false;
  const DispatchSendArgs& args;

  MOE_A2A_DEVICE int num_rows() const { return args.num_tokens; }
  MOE_A2A_DEVICE Scheduled at(const Warp& warp, int token) const {
    const HeapView& heap = args.context.heap;
    return {{dst_ranks_of(warp, args, token), token, (heap.rank + 1 + token) % heap.num_ranks}, token};
  }
};

// Source: the caller's rows as they are.
struct TokenRows : GivenRows {
  const DispatchSendArgs& args;

  template <class Sender>
  MOE_A2A_DEVICE void send(const Warp&, Sender& sender, const Scheduled& scheduled, const Piece& piece) const {
    RowSource row = layout.part(piece);
    row.values = args.x[scheduled.row] + row.values_offset;
    if (row.num_scale_bytes > 0) {
      row.scales = args.x_scales[scheduled.row] + piece.first / kScaleBlock * int64_t{sizeof(float)};
    }
    sender.send(row, scheduled.delivery);
  }
};

// Source: the caller's rows, quantised on the way.
struct QuantizedRows : TokenRows {
  template <class Sender>
  MOE_A2A_DEVICE void send(const Warp& warp, Sender& sender, const Scheduled& scheduled, const Piece& piece) const {
    std::byte* staged = sender.open_stage(scheduled.delivery);
    std::byte* scales = staged + (piece.size() + 15) / 16 * 16;  // same distance behind the values as in a whole row
    const auto formed = [&](int num_values) {
      if constexpr (requires { sender.send_early(scheduled.delivery, num_values); }) {
        sender.send_early(scheduled.delivery, num_values);
      }
    };
    with_element_type(args.x_dtype(), [&](auto type) {
      using T = decltype(type);
      quantize_piece(warp, piece, args.vector_rows, reinterpret_cast<const T*>(args.x[scheduled.row]),
                     reinterpret_cast<Float8*>(staged), reinterpret_cast<float*>(scales), formed);
    });
    RowSource row = layout.part(piece);
    row.values = staged;
    row.scales = scales;
    row.in_shared = true;
    sender.send_staged(row, scheduled.delivery);
  }
};

struct DispatchSend {
  using Args = DispatchSendArgs;
  static constexpr const char* kName = "dispatch_send";

  MOE_A2A_HOST_DEVICE static RowLayout sent_layout(const Args& args) {
    return args.context.config.row(args.row_dtype());
  }
  MOE_A2A_HOST_DEVICE static bool sends_ll_rows(const Args& args) {
    return args.context.config.sends_ll_rows(args.num_tokens, args.row_dtype());
  }
  template <class F>
  MOE_A2A_DEVICE static auto with_batch(const Args& args, const F& f) {
    return moe_a2a::with_batch(args.context.config, args.num_tokens, args.row_dtype(), f);
  }

  template <class Wire>
  MOE_A2A_HOST_DEVICE static typename Wire::Plan plan(const Args& args) {
    const RowLayout layout = sent_layout(args);
    return Wire::plan(layout,
                      args.quantize ? StagedFor::kQuantizing : staged_for_sending(layout, args.x, args.x_scales),
                      args.context.max_shared_bytes);
  }
  // The table is sent before the rows, from the same memory.
  static size_t shared_bytes(const Args& args) {
    if (sends_ll_rows(args)) return plan<LlWire>(args).bytes;
    const int rows = plan<RowWire>(args).bytes, table = RoutingTable::plan(args.context.config).bytes;
    return rows > table ? rows : table;
  }

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte* shared) {
    const uint64_t epoch = args.context.region.epoch(args.buffer) + 1;
    with_batch(args, [&](auto batch) MOE_A2A_INLINED {
      using Batch = typename decltype(batch)::type;
      prefetch_rows(batch, args, grid, block);
      const bool has_credits = await_credits(args.context, block, args.buffer, epoch, args.number);
      if (!begin(args, grid, block, epoch, has_credits)) return make_void(args, grid, block);
      send_routing(batch, args, grid, block, shared, epoch);
      if (Batch::kHasTable) block.release_sync();  // the rows reuse the table's memory; their signals follow
      send_rows(batch, args, grid, block, shared, epoch, [&] { return RowWire::begin(block); });
    });
  }

  // ---- the steps, run by its own launch or by a fused one (dispatch.h)

  // Prefetches what a warp's first unit of a small batch reads, overlapping the wait for credits. `senders`: the blocks
  // that send rows.
  template <class Batch>
  MOE_A2A_DEVICE static void prefetch_rows(std::type_identity<Batch>, const Args& args, const Grid& senders,
                                           const Block& block) {
    if constexpr (Batch::Wire::kIsLl) {
      if (has_part_in(senders)) prefetch_first_unit(args, senders, block);
    }
  }
  // Waits for the credits of `epoch`, in one of the block's warps; the others go on to a barrier. False if this
  // thread's wait gave up.
  MOE_A2A_DEVICE static bool await_credits(const Context& c, const Block& block, int buffer, uint64_t epoch,
                                           const DispatchNumber& number, int waiting_warp = 0) {
    if (block.warp_rank() != waiting_warp) return true;
    const Warp warp = block.warp();
    const bool has_given_up = c.region.has_given_up(0) != 0;  // loaded together with the credits
    bool good = true;
    for (int r = warp.rank(); r < c.heap.num_ranks; r += warp.size()) {
      good &= await_credit(c, buffer, r, epoch - 1, number);
    }
    return good && !has_given_up;
  }
  // A barrier, before anything is sent; false if the wait for credits gave up. All of the block's threads have read the
  // epoch, so one with little else to do counts the block. The last block of the launch advances the epoch.
  MOE_A2A_DEVICE static bool begin(const Args& args, const Grid& grid, const Block& block, uint64_t epoch,
                                   bool has_credits) {
    const MoeRegion& region = args.context.region;
    const bool good = !block.any(!has_credits);
    if (block.rank() == block.size() / 2 &&
        count_block(grid, region.arrivals.at(args.buffer, MoeRegion::kDispatchSend)) && good) {
      region.is_void(args.buffer) = 0;
      advance_epoch(region, args.buffer, epoch);
    }
    return good;
  }
  // Called after begin() gave up, so that already queued calls have nothing to receive, to send or to wait for.
  MOE_A2A_DEVICE static void make_void(const Args& args, const Grid& grid, const Block& block) {
    const Context& c = args.context;
    const int first = grid.rank() * block.size() + block.rank(), step = grid.size() * block.size();
    for (int t = first; t < args.num_tokens; t += step) c.region.token_ranks(args.buffer, t) = {};
    for (int r = first; r <= c.heap.num_ranks; r += step) c.region.landed_offsets(args.buffer, r) = 0;
    for (int e = first; e <= c.config.num_local_experts; e += step) c.region.expert_offsets(args.buffer, e) = 0;
    for (int e = first; e < c.config.num_local_experts; e += step) c.region.expert_counts(args.buffer, e) = 0;
    if (first == 0) c.region.is_void(args.buffer) = 1;
  }

  template <class Batch>
  MOE_A2A_DEVICE static void send_routing(std::type_identity<Batch>, const Args& args, const Grid& grid,
                                          const Block& block, std::byte* shared, uint64_t epoch) {
    if constexpr (Batch::kHasTable) {
      RoutingTable(args, block, shared).send(grid, epoch);
    } else if constexpr (!Batch::Wire::kIsLl) {
      make_round_robin(grid, block.warp_rank(), block.num_warps()).walk(args.num_tokens, [&](int token) {
        send_choices(args, block.warp(), token, epoch);
        return true;
      });
    }  // a small batch sends its choices with its rows
  }

  // `begin`: as RowWire::send() calls it. A small batch's rows follow begin(), and with them their choices.
  template <class Batch, class Begin>
  MOE_A2A_DEVICE static bool send_rows(std::type_identity<Batch>, const Args& args, const Grid& grid,
                                       const Block& block, std::byte* shared, uint64_t epoch, const Begin& begin) {
    using Wire = typename Batch::Wire;
    const Context& c = args.context;
    const Exchange exchange = dispatch_rows(c, args.buffer, epoch);
    const RowLayout layout = sent_layout(args);
    const typename Wire::Plan plan = DispatchSend::plan<Wire>(args);
    Wire wire(exchange, layout, grid, block, shared, plan,
              c.region.tickets.at(args.buffer, MoeRegion::dispatch_queue(epoch)));
    const auto send = [&](const auto& source) MOE_A2A_INLINED {
      if constexpr (Wire::kIsLl) {
        wire.send(TokenSchedule{args}, source);
        return true;
      } else {
        return wire.send(TokenSchedule{args}, source, begin);
      }
    };
    if constexpr (Wire::kIsLl) {
      announce(args, grid, block, epoch);
      wire.walk(args.num_tokens, [&](int token) {
        send_choices(args, block.warp(), token, epoch);
        return true;
      });
    }
    return args.quantize ? send(QuantizedRows{{{layout}, args}}) : send(TokenRows{{layout}, args});
  }

  // Waits until `rank` no longer reads the previous use of this buffer, whether or not it exchanged tokens with this
  // one. Pairs with the release in return_credit().
  //
  // A peer may have no buffer for this dispatch: all of its buffers are open, this one included, so its credit is
  // missing and its refusal ends the wait. The credit that it gives later says that this dispatch was refused, so all
  // blocks agree whichever of the two they observe. A peer that refuses only a later dispatch gave this credit before,
  // without that mark. It may even have given the credit of the next epoch, if it ended its own next dispatch on this
  // buffer without rows: the note says whether that is this one.
  MOE_A2A_DEVICE static bool await_credit(const Context& c, int buffer, int rank, uint64_t epoch,
                                          const DispatchNumber& number) {
    const WaitSite site{moe_op::kDispatchSend, moe_kind::kCreditWait, rank, -1, text_slot(c)};
    const Signal* credit = c.region.dispatch_credit.at(buffer, rank);
    bool is_refused = false;
    uint32_t polls = 0;
    const auto find_credit = [&](uint64_t& seen) {
      uint32_t note = 0;
      if (!has_arrived(credit, epoch, seen, &note)) return false;
      const bool takes_part = Signal::epoch_of(seen) == epoch ? CreditNote::refused_in(note) < number.since
                                                              : CreditNote::may_be_of(note, number);
      is_refused = number.number != 0 && !takes_part;
      return true;
    };
    const bool good = wait_until(epoch, site, c.wait, c.heap, {}, [&](uint64_t& seen) {
      if (find_credit(seen)) return true;
      if (number.number == 0 || ++polls % kPollsPerLook != 0) return false;
      uint64_t word = 0;
      if (!has_arrived(c.region.dispatch_refusal.at(rank), number.number, word, nullptr)) return false;
      if (!find_credit(seen)) is_refused = true;
      return true;
    });
    if (good && !is_refused) return true;
    if (is_refused) {
      write_report(c.wait, c.heap, site, Reason::kRefused, 0, number.number, 0, 0);
    } else {
      give_up(c);  // the epoch stays: a later dispatch, if it found the credit, would pass for this one
    }
    return false;
  }
  // Such a refusal belongs to no buffer; its text has a separate slot, after those of the buffers.
  MOE_A2A_DEVICE static int text_slot(const Context& c) { return c.config.num_buffers; }

 private:
  // The signal that accompanies a small batch's words, raised by threads with little else to do. It releases this
  // rank's earlier accesses: the rank no longer reads the sums of the previous combine. (The choices imply that
  // earlier, but order nothing.) Pairs with the acquire in DispatchRecv::see_announcements().
  MOE_A2A_DEVICE static void announce(const Args& args, const Grid& grid, const Block& block, uint64_t epoch) {
    const Context& c = args.context;
    if (grid.rank() != grid.size() - 1) return;
    if (block.rank() == block.size() - 1) {
      signal_earlier_launches(c.heap, RankSet::all(c.heap.num_ranks),
                              c.region.table_signal.at(args.buffer, c.heap.rank, 0), epoch, args.header());
    }
    if (args.num_tokens == 0 && block.rank() == 0) send_choice(c, args.buffer, args.header(), 0, 0, -1, 0, epoch);
  }

  MOE_A2A_DEVICE static void prefetch_first_unit(const Args& args, const Grid& grid, const Block& block) {
    const MoeConfig& config = args.context.config;
    const int pieces = config.num_pieces(), unit = grid.rank() + grid.size() * block.warp_rank();
    if (unit >= args.num_tokens * (pieces + 1)) return;
    const Warp warp = block.warp();
    const int number = unit - args.num_tokens;
    const Division place = config.by_pieces.divide(number < 0 ? 0 : number);
    const int token = number < 0 ? unit : place.quotient;
    const int64_t first_choice = int64_t{token} * config.num_topk;
    if (warp.rank() == 0) prefetch(args.topk_idx.at(first_choice));
    if (number < 0) {
      if (warp.rank() == 0 && args.topk_weights != nullptr) prefetch(args.topk_weights + first_choice);
      return;
    }
    constexpr int kLine = 128;
    const RowLayout layout = config.row(args.x_dtype());
    const RowSource part = layout.part(layout.piece(place.remainder));
    const std::byte* values = args.x[token] + part.values_offset;
    for (int64_t i = warp.rank() * kLine; i < part.num_value_bytes; i += warp.size() * kLine) prefetch(values + i);
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
