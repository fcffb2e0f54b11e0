// What combine sends: the sum of each landed row. Either the caller has formed it, or it is formed here from the
// outputs of the local experts, in k order: the order of addition is part of the contract.
#pragma once

#include "moe/wires.h"
#include "rows/row_sum.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// Source: the caller's sums, sent straight from `y`.
struct PresummedRows : GivenRows {
  const CombineSendArgs& args;

  template <class Sender>
  MOE_A2A_DEVICE void send(const Warp&, Sender& sender, const Scheduled& scheduled, const Piece& piece) const {
    RowSource row = layout.part(piece);
    row.values = args.given_sum(scheduled.row) + row.values_offset;
    sender.send(row, scheduled.delivery);
  }
};

// ---- sums formed here

// Counts a route past the end of a `y` that is too short; raised by the next raise_reported().
MOE_A2A_DEVICE void count_short_route(const CombineSendArgs& args) {
  atomic_add<Order::kRelaxed, Scope::kDevice>(&args.context.region.errors.data->num_short_y_routes, 1u);
}
MOE_A2A_DEVICE void count_short_routes(const CombineSendArgs& args, const RouteTerm* terms) {
  for_each_term(terms, args.context.config.num_topk, [&](const RouteTerm& term) {
    if (term.position >= args.num_y_rows) count_short_route(args);
  });
}

// The terms of a landed row, as add_rows() takes them.
template <class T>
class RouteTerms {
 public:
  MOE_A2A_DEVICE RouteTerms(const CombineSendArgs& args, const RouteTerm* term)
      : args_(args), term_(term), end_(term + args.context.config.num_topk) {}

  MOE_A2A_DEVICE Term<T> next() {
    while (term_ != end_) {
      const RouteTerm term = *term_++;
      if (term.position < 0) {
        term_ = end_;
      } else if (term.position < args_.num_y_rows) {
        return {reinterpret_cast<const T*>(args_.y[term.position]), term.weight};
      }
    }
    return {};
  }

 private:
  const CombineSendArgs& args_;
  const RouteTerm* term_;
  const RouteTerm* end_;
};

// Base of sources: a group of threads forms each sum in registers and stores it where the sender wants it.
struct FormedRows {
  static constexpr TraceKind kKind = moe_kind::kSum;
  RowLayout layout;

  template <class Port, class F>
  MOE_A2A_DEVICE void with_row_sender(const Port& port, const F& f) const {
    InPlaceSender sender(port.warp, port.slot_at, port.done);
    f(sender);
  }
  // form(T*) stores the piece, with elements of the row's type.
  template <class Sender, class Form>
  MOE_A2A_DEVICE void send_formed(Sender& sender, const Delivery& delivery, const Piece& piece,
                                  const Form& form) const {
    std::byte* target = sender.open_stage(delivery);
    with_element_type(layout.dtype, [&](auto type) { form(reinterpret_cast<decltype(type)*>(target)); });
    RowSource row = layout.part(piece);
    row.values = target;
    row.in_shared = true;
    sender.send_staged(row, delivery);
  }
};

// Source: the sums of the outputs of the local experts.
struct SummedRows : FormedRows {
  const CombineSendArgs& args;

  template <class Group, class Sender>
  MOE_A2A_DEVICE void send(const Group& group, Sender& sender, const Scheduled& scheduled, const Piece& piece) const {
    const RouteTerm* terms = args.context.region.landed_term.at(args.buffer, scheduled.row);
    send_formed(sender, scheduled.delivery, piece, [&]<class T>(T* target) {
      add_rows(group, piece, args.vector_rows, RouteTerms<T>(args, terms), target);
    });
    if (group.rank() == 0 && piece.first == 0) count_short_routes(args, terms);  // last: nothing waits for it
  }
};

// Source: the same sums, streamed (rows/row_sum.h). One term per lane; those in `lanes` are added in ascending
// order.
struct LaneTerms {
  const std::byte* row = nullptr;
  float weight = 0;
  uint32_t lanes = 0;
};

MOE_A2A_DEVICE LaneTerms lane_terms(const CombineSendArgs& args, const Warp& warp, int row) {
  const RouteTerm* terms = args.context.region.landed_term.at(args.buffer, row);
  const RouteTerm term = warp.rank() < args.context.config.num_topk ? terms[warp.rank()] : RouteTerm{};
  const bool is_end = term.position < 0, is_there = !is_end && term.position < args.num_y_rows;
  const uint64_t ends_and_there =
      warp.reduce_or(uint64_t{is_end} << (warp.rank() + 32) | uint64_t{is_there} << warp.rank());
  const uint32_t ends = static_cast<uint32_t>(ends_and_there >> 32), there = static_cast<uint32_t>(ends_and_there);
  const uint32_t before_end = (ends & (~ends + 1)) - 1;
  if (before_end >> warp.rank() & 1 && !is_there) count_short_route(args);
  return {is_there ? args.y[term.position] : nullptr, term.weight, there & before_end};
}

template <class T>
struct StreamedRows {
  static constexpr TraceKind kKind = moe_kind::kSum;
  const CombineSendArgs& args;
  RowLayout layout;

  template <class Reader, class Pieces>
  struct Sender {
    Reader& reader;
    Pieces& pieces;

    MOE_A2A_DEVICE void finish() { pieces.finish(); }
  };

  template <class Port, class F>
  MOE_A2A_DEVICE void with_row_sender(const Port& port, const F& f) const {
    with_row_reader(port.warp, port.stage, [&](auto& reader) {
      with_piece_sender<Delivery>(port.warp, port.slot_at, port.done, port.stage + kReaderBytes, [&](auto& pieces) {
        Sender<std::remove_reference_t<decltype(reader)>, std::remove_reference_t<decltype(pieces)>> sender{reader,
                                                                                                            pieces};
        f(sender);
      });
    });
  }
  template <class Sender>
  MOE_A2A_DEVICE void send(const Warp& warp, Sender& sender, const Scheduled& scheduled, const Piece& piece) const {
    constexpr int kElement = sizeof(T);
    const int num_bytes = piece.size() * kElement;
    const LaneTerms terms = lane_terms(args, warp, scheduled.row);
    sender.reader.begin(terms.row, terms.lanes, num_bytes);
    const auto weight_of = [&](int lane) { return warp.broadcast(terms.weight, lane); };
    const auto store = [&](int first, const StreamedSums<T>& sums) {
      const int begin = first * kElement, left = num_bytes - begin;
      store_streamed(warp, sums, piece.size() - first, reinterpret_cast<T*>(sender.pieces.open()));
      sender.pieces.send(scheduled.delivery, begin, left < kStreamBytes ? left : kStreamBytes, left <= kStreamBytes);
    };
    add_streamed<T>(warp, sender.reader, terms.lanes, piece.size(), weight_of, store);
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
