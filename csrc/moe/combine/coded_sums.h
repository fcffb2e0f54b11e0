// What combine sends if its wire is a line codec: the sums of landed_sums.h, rounded to the rows' type, then encoded.
// A rank's sums for its own tokens cross no link and stay as they are. Each row's signal says its codec, so the ranks
// need not agree on one.
#pragma once

#include "moe/combine/landed_sums.h"
#include "rows/coded_row.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// The terms of a landed row, or the caller's sum as the only one.
template <class T>
class GivenTerms {
 public:
  MOE_A2A_DEVICE GivenTerms(const CodedCombineSendArgs& args, int row)
      : routes_(args, args.context.region.landed_term.at(args.buffer, row)),
        presummed_(args.presummed),
        sum_(args.presummed ? reinterpret_cast<const T*>(args.given_sum(row)) : nullptr) {}

  MOE_A2A_DEVICE Term<T> next() {
    if (!presummed_) return routes_.next();
    const T* sum = sum_;
    sum_ = nullptr;
    return {sum, 1.0f};
  }

 private:
  RouteTerms<T> routes_;
  bool presummed_;
  const T* sum_;
};

// The row of a delivery, to be written at `data`.
MOE_A2A_DEVICE CodedRow coded_row(const CodedCombineSendArgs& args, const Delivery& delivery, std::byte* data) {
  const MoeConfig& config = args.context.config;
  return {data, args.codec_to(delivery.first_dst_rank), config.dtype, config.hidden};
}

// Base of sources: a row's signal carries its codec.
struct CodedSource {
  static constexpr TraceKind kKind = moe_kind::kSum;
  const CodedCombineSendArgs& args;

  MOE_A2A_DEVICE uint32_t payload(const Delivery& delivery) const {
    return static_cast<uint32_t>(args.codec_to(delivery.first_dst_rank));
  }
};

// Source: a warp loads and adds the terms.
template <class T>
struct CodedLandedSums : CodedSource {
  template <class Port, class F>
  MOE_A2A_DEVICE void with_row_sender(const Port& port, const F& f) const {
    InPlaceSender sender(port.warp, port.slot_at, port.done);
    f(sender);
  }
  template <class Sender>
  MOE_A2A_DEVICE void send(const Warp& warp, Sender& sender, const Scheduled& scheduled, const Piece&) const {
    if (!args.presummed && warp.rank() == 0) {
      count_short_routes(args, args.context.region.landed_term.at(args.buffer, scheduled.row));
    }
    write_sum<T>(warp, args.vector_rows, GivenTerms<T>(args, scheduled.row),
                 coded_row(args, scheduled.delivery, sender.open_stage(scheduled.delivery)));
    sender.send_staged({}, scheduled.delivery);
  }
};

// Source: the terms are streamed to the warp.
template <class T>
struct StreamedCodedSums : CodedSource {
  template <class Reader, class InPlace>
  struct Sender {
    Reader& reader;
    InPlace in_place;

    MOE_A2A_DEVICE void finish() { in_place.finish(); }
  };

  template <class Port, class F>
  MOE_A2A_DEVICE void with_row_sender(const Port& port, const F& f) const {
    with_row_reader(port.warp, port.stage, [&](auto& reader) {
      InPlaceSender in_place(port.warp, port.slot_at, port.done);
      Sender<std::remove_reference_t<decltype(reader)>, decltype(in_place)> sender{reader, in_place};
      f(sender);
    });
  }
  template <class Sender>
  MOE_A2A_DEVICE void send(const Warp& warp, Sender& sender, const Scheduled& scheduled, const Piece& piece) const {
    const LaneTerms terms =
        args.presummed ? LaneTerms{args.given_sum(scheduled.row), 1.0f, 1u} : lane_terms(args, warp, scheduled.row);
    sender.reader.begin(terms.row, terms.lanes, piece.size() * static_cast<int>(sizeof(T)));
    const CodedRow row = coded_row(args, scheduled.delivery, sender.in_place.open_stage(scheduled.delivery));
    const auto weight_of = [&](int lane) { return warp.broadcast(terms.weight, lane); };
    const auto store = [&](int first, const StreamedSums<T>& sums) { write_streamed<T>(warp, row, first, sums); };
    add_streamed<T>(warp, sender.reader, terms.lanes, piece.size(), weight_of, store);
    sender.in_place.send_staged({}, scheduled.delivery);
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
