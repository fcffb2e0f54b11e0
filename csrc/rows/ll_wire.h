// The wire of small batches: pieces of rows as LL words, one warp per piece. No signal, no fence.
#pragma once

#include "arch/shared_plan.h"
#include "comm/work_queue.h"
#include "rows/ll_row.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// Sends one piece; same interface as PlainRowSender (arch/row_sender.h). `kForming`: the trace slice for forming a
// piece in the stage; kSend: none.
template <TraceKind kForming>
class LlSender {
 public:
  MOE_A2A_DEVICE LlSender(const Exchange& exchange, const Warp& warp, std::byte* stage, int first_word)
      : exchange_(exchange), warp_(warp), stage_(stage), first_word_(first_word) {}

  // Received by LlWire::receive() or LlSum. (Storing a rank's own pieces straight into their slots was 1 us faster with
  // 128 tokens, 0.5 us slower with 8.)
  MOE_A2A_DEVICE void send(const RowSource& row, const Delivery& delivery) const {
    const HeapView& heap = exchange_.heap;
    LlWord* local = ll_words_at(exchange_.ll_words, exchange_.buffer, heap.rank, delivery.token, first_word_);
    const uint64_t start = trace_now();
    send_ll(warp_, delivery, row, exchange_.epoch, [&](int rank) { return heap.peer(rank, local); });
    record_send_ll(exchange_.trace(), warp_, delivery.dst_ranks, delivery.token, start);
  }

  MOE_A2A_DEVICE std::byte* open_stage(const Delivery&) {
    start_ = trace_now();
    warp_.sync();  // all lanes have read the previous piece before any overwrites it
    return stage_;
  }
  MOE_A2A_DEVICE void send_staged(const RowSource& row, const Delivery& delivery) {
    warp_.sync();  // the piece is complete before any lane sends part of it
    if (kForming != TraceKind::kSend) {
      record(exchange_.trace(), warp_,
             {.kind = kForming, .begin = start_, .peer = delivery.first_dst_rank, .token = delivery.token});
    }
    send(row, delivery);
  }

 private:
  const Exchange& exchange_;
  const Warp& warp_;
  std::byte* stage_;
  int first_word_;
  uint64_t start_ = 0;
};

class LlWire {
 public:
  static constexpr bool kIsLl = true;

  // A stage per sending warp, if pieces are formed before they are sent.
  struct Plan {
    SharedPart<std::byte> stages;
    int stage_bytes = 0;
    int num_senders = 0;
    int bytes = 0;
  };
  MOE_A2A_HOST_DEVICE static Plan plan(const RowLayout& layout, StagedFor what, int max_shared_bytes) {
    const RowLayout longest{RowLayout::piece_length(), layout.dtype};
    Plan plan;
    const bool sends_as_is = what == StagedFor::kSending || what == StagedFor::kStoring;
    plan.stage_bytes = sends_as_is ? 0 : static_cast<int>(longest.stride());
    plan.num_senders = warps_with_stage(plan.stage_bytes, max_shared_bytes, kBlockWarps);
    SharedCarver carver;
    plan.stages = carver.take_lines(plan.stage_bytes * plan.num_senders);
    plan.bytes = carver.bytes();
    return plan;
  }

  // ---- sending

  MOE_A2A_DEVICE LlWire(const Exchange& exchange, const RowLayout& layout, const Grid& grid, const Block& block,
                        std::byte* shared, const Plan& plan, uint32_t* /*ticket*/)
      : exchange_(exchange),
        layout_(layout),
        warp_(block.warp()),
        is_sender_(block.warp_rank() < plan.num_senders),
        stage_(plan.stages.in(shared) + block.warp_rank() * plan.stage_bytes),
        turns_(make_round_robin(grid, block.warp_rank(), plan.num_senders)) {}

  // Shares `num_units` units of other work among the sending warps, ahead of the rows.
  template <class Visit>
  MOE_A2A_DEVICE void walk(int num_units, const Visit& visit) {
    if (is_sender_) turns_.walk(num_units, visit);
  }

  // Sends the pieces of all rows as one sequence of units.
  template <class Schedule, class Source>
  MOE_A2A_DEVICE void send(const Schedule& schedule, const Source& source) {
    walk(schedule.num_rows() * layout_.num_pieces(), [&](int unit) {
      const auto [row, piece] = exchange_.by_pieces.divide(unit);
      const Scheduled scheduled = schedule.at(warp_, row);
      if (scheduled.delivery.dst_ranks.empty()) return true;
      LlSender<Source::kKind> sender(exchange_, warp_, stage_, piece * ll_words_per_piece(layout_));
      source.send(warp_, sender, scheduled, layout_.piece(piece));
      return true;
    });
  }

  // ---- receiving

  // Waits for a piece and stores it in its row; false if it gave up.
  MOE_A2A_DEVICE static bool receive(const Exchange& exchange, const RowLayout& layout, const Warp& warp, int piece,
                                     const WaitSite& site) {
    const LlWord* words =
        ll_words_at(exchange.ll_words, exchange.buffer, site.peer, site.token, piece * ll_words_per_piece(layout));
    return !warp.any(!receive_ll(warp, exchange.heap, exchange.wait, words, layout.part(layout.piece(piece)),
                                 exchange.rows.at(exchange.buffer, site.peer, site.token), exchange.epoch, site));
  }

 private:
  const Exchange& exchange_;
  const RowLayout layout_;
  Warp warp_;
  bool is_sender_;
  std::byte* stage_;
  RoundRobin<> turns_;
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
