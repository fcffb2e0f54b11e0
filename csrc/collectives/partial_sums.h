// Partial results that pass through several ranks: they travel in fp32, whatever the dtype, and are rounded once, at
// the end.
#pragma once

#include "collectives/meeting.h"
#include "collectives/reduction.h"
#include "rows/line_codec.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// Calls visit(first) for this thread's vectors of `count` values.
template <class Visit>
MOE_A2A_DEVICE void for_lane_values(const Block& block, int64_t count, const Visit& visit) {
  for (int64_t first = block.rank() * kLineValues; first < count; first += block.size() * kLineValues) visit(first);
}

// One rank's values, and how they are merged.
template <class T, class Op>
struct Merging {
  const T* x;
  int64_t count;
  int num_ranks;

  MOE_A2A_DEVICE void load_x(int64_t first, LineValues& values) const {
    load_floats(x + first, count - first, are_vectors(x, x), values);
  }
  MOE_A2A_DEVICE void load(const float* partial, int64_t first, LineValues& values) const {
    load_floats(partial + first, count - first, true, values);
  }
  MOE_A2A_DEVICE void store(const LineValues& values, int64_t first, float* partial) const {
    store_floats(partial + first, count - first, true, values);
  }
  MOE_A2A_DEVICE static void merge(LineValues& merged, const LineValues& values) {
    MOE_A2A_UNROLL
    for (int i = 0; i < kLineValues; ++i) merged[i] = Op::merge(merged[i], values[i]);
  }
  // The final step: rounded into out and, unless null, into `copy`, which is aligned.
  MOE_A2A_DEVICE void finish(LineValues& merged, int64_t first, T* out, T* copy) const {
    MOE_A2A_UNROLL
    for (int i = 0; i < kLineValues; ++i) merged[i] = Op::finish(merged[i], num_ranks);
    store_floats(out + first, count - first, are_vectors(out, out), merged);
    if (copy != nullptr) store_floats(copy + first, count - first, true, merged);
  }
};

// Calls f(T{}, Op{}).
template <class F>
MOE_A2A_DEVICE void with_element_and_operator(DType dtype, ReduceOp op, F f) {
  with_element_type(dtype, [&](auto element) { with_operator(op, [&](auto kind) { f(element, kind); }); });
}

// Waits for chunk i in a place that `peer` writes; false if it did not arrive.
MOE_A2A_DEVICE bool wait_for_place(const Part& part, const Block& block, const Array<Signal, 3>& signals, int place,
                                   int peer, int i) {
  const CollectiveContext& c = part.context;
  bool good = true;
  if (block.rank() == 0) {
    const WaitSite site{part.operation, collective_kind::kChunkWait, peer, i};
    good = wait_for(signals.at(part.half(), place, i), part.epoch, site, c.wait, c.heap);
  }
  return !block.any(!good);
}

// Chunk i in that place of `peer` is complete: pairs with the acquire in wait_for_place().
MOE_A2A_DEVICE void signal_place(const Part& part, const Block& block, const Array<Signal, 3>& signals, int place,
                                 int peer, int i) {
  block.release_sync();
  if (block.rank() == 0) {
    signal_many(part.context.heap, RankSet::only(peer), signals.at(part.half(), place, i), part.epoch);
  }
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
