// How batches travel, and which slots each step's rows go to.
#pragma once

#include <type_traits>

#include "moe/args.h"
#include "rows/ll_wire.h"
#include "rows/row_wire.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// The routing of a large batch is a table, which needs a fence and a signal behind it; other batches send their choices
// as LL words. Whole rows need a signal each; rows as LL words need stamps, which add a third to the bytes (words
// of 16 bytes) or double them (of 8).
struct SmallBatch {
  static constexpr bool kHasTable = false;
  using Wire = LlWire;
};
struct MediumBatch {
  static constexpr bool kHasTable = false;
  using Wire = RowWire;
};
struct LargeBatch {
  static constexpr bool kHasTable = true;
  using Wire = RowWire;
};
// Calls f(std::type_identity<Batch>) with the kind of a batch whose rows travel as `row_dtype`.
template <class F>
MOE_A2A_DEVICE auto with_batch(const MoeConfig& config, int num_tokens, DType row_dtype, const F& f) {
  if (config.sends_ll_rows(num_tokens, row_dtype)) return f(std::type_identity<SmallBatch>{});
  if (config.sends_ll_choices(num_tokens)) return f(std::type_identity<MediumBatch>{});
  return f(std::type_identity<LargeBatch>{});
}
template <class Batch>
MOE_A2A_DEVICE bool is(const MoeConfig& config, int num_tokens, DType row_dtype) {
  return with_batch(config, num_tokens, row_dtype,
                    [](auto batch) { return std::is_same_v<typename decltype(batch)::type, Batch>; });
}
// Calls f(std::type_identity<Wire>) with the wire that sums return by; f is MOE_A2A_INLINED.
template <class F>
MOE_A2A_DEVICE auto with_wire(bool sums_return_ll, const F& f) {
  return sums_return_ll ? f(std::type_identity<LlWire>{}) : f(std::type_identity<RowWire>{});
}

// Base of sources: rows that the caller has given.
struct GivenRows {
  static constexpr TraceKind kKind = TraceKind::kSend;
  RowLayout layout;  // as the rows travel

  template <class Port, class F>
  MOE_A2A_DEVICE void with_row_sender(const Port& port, const F& f) const {
    auto sender = make_warp_sender<Delivery>(port.warp, port.slot_at, port.done, port.stage, layout.num_bytes());
    f(sender);
  }
};

// Rows to the ranks of their experts, and sums back to the ranks of their tokens.
MOE_A2A_DEVICE Exchange dispatch_rows(const Context& c, int buffer, uint64_t epoch) {
  return {c.heap, c.wait, c.region.row_signal, c.region.row, c.region.ll_row, c.config.by_pieces, buffer, epoch};
}
MOE_A2A_DEVICE Exchange combine_rows(const Context& c, int buffer, uint64_t epoch) {
  return {c.heap, c.wait, c.region.combine_signal, c.region.combine_row, c.region.ll_combine_row, c.config.by_pieces,
          buffer, epoch};
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
