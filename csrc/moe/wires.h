// Which wire a batch takes, and which slots each step's rows go to.
#pragma once

#include <type_traits>

#include "moe/args.h"
#include "rows/ll_wire.h"
#include "rows/row_wire.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// Calls f(std::type_identity<Wire>) with the wire for a small or a large batch.
template <class F>
MOE_A2A_DEVICE auto with_wire(bool is_small, const F& f) {
  return is_small ? f(std::type_identity<LlWire>{}) : f(std::type_identity<RowWire>{});
}

// Rows to the ranks of their experts, and sums back to the ranks of their tokens.
MOE_A2A_DEVICE Exchange dispatch_rows(const Context& c, int buffer, uint64_t epoch) {
  return {c.heap, c.wait, c.region.row_signal, c.region.row, c.region.ll_row, buffer, epoch};
}
MOE_A2A_DEVICE Exchange combine_rows(const Context& c, int buffer, uint64_t epoch) {
  return {c.heap, c.wait, c.region.combine_signal, c.region.combine_row, c.region.ll_combine_row, buffer, epoch};
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
