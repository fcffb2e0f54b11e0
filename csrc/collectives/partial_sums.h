// Partial results that pass through several ranks: they travel in fp32, whatever the dtype, and are rounded once, at
// the end.
#pragma once

#include "collectives/meeting.h"
#include "collectives/reduction.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// Calls visit(first) for this thread's vectors of `count` values.
template <class Visit>
MOE_A2A_DEVICE void for_lane_values(const Block& block, int64_t count, const Visit& visit) {
  for (int64_t first = block.rank() * kLineValues; first < count; first += block.size() * kLineValues) visit(first);
}

// One rank's values, and how they are merged. The dtype and the operator are chosen for each vector, not around the
// loops: these kernels wait for links, and a copy of each loop for each choice takes half a minute to compile.
struct Merging {
  DType dtype;
  ReduceOp op;
  const std::byte* x;
  int64_t count;
  int num_ranks;

  MOE_A2A_DEVICE void load_x(int64_t first, LineValues& values) const {
    with_element_type(dtype, [&](auto element) {
      const auto* source = reinterpret_cast<const decltype(element)*>(x);
      load_floats(source + first, count - first, are_vectors(x, x), values);
    });
  }
  MOE_A2A_DEVICE void load(const float* partial, int64_t first, LineValues& values) const {
    load_floats(partial + first, count - first, true, values);
  }
  // The partial result merged with this rank's values; null: these alone.
  MOE_A2A_DEVICE void load_merged(const float* partial, int64_t first, LineValues& merged) const {
    load_x(first, merged);
    if (partial == nullptr) return;
    LineValues values;
    for (int v = 0; v < kLineValues; ++v) values[v] = merged[v];
    load(partial, first, merged);
    merge(op, merged, values);
  }
  MOE_A2A_DEVICE void store(const LineValues& values, int64_t first, float* partial) const {
    store_floats(partial + first, count - first, true, values);
  }
  // The final step: rounded into out and, unless null, into `copy`, which is aligned.
  MOE_A2A_DEVICE void finish(LineValues& merged, int64_t first, std::byte* out, std::byte* copy) const {
    divide(merged, divisor_of(op, num_ranks));
    with_element_type(dtype, [&](auto element) {
      using T = decltype(element);
      store_floats(reinterpret_cast<T*>(out) + first, count - first, are_vectors(out, out), merged);
      if (copy != nullptr) store_floats(reinterpret_cast<T*>(copy) + first, count - first, true, merged);
    });
  }
};

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
