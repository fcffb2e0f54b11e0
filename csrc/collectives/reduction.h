// Merges the rows of all ranks element by element, in rank order and in fp32, and rounds once: one-shot and two-shot
// give the same bits, on every rank.
#pragma once

#include "collectives/announcement.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

struct Sum {
  MOE_A2A_DEVICE static float merge(float a, float b) { return a + b; }
};
// A NaN on any rank gives NaN; of equal values (zeros of either sign) the first rank's is the result.
struct Largest {
  MOE_A2A_DEVICE static float merge(float a, float b) { return b > a || b != b ? b : a; }
};
struct Smallest {
  MOE_A2A_DEVICE static float merge(float a, float b) { return b < a || b != b ? b : a; }
};

// An average is a sum that divide() completes, since each operator costs a copy of the merging loops.
template <class F>
MOE_A2A_DEVICE void with_operator(ReduceOp op, F f) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
      return f(Sum{});
    case ReduceOp::kMax:
      return f(Largest{});
    case ReduceOp::kMin:
      return f(Smallest{});
  }
}

MOE_A2A_DEVICE float divisor_of(ReduceOp op, int num_rows) {
  return op == ReduceOp::kAvg ? static_cast<float>(num_rows) : 1.0f;
}

template <int kCount>
MOE_A2A_DEVICE void divide(float (&merged)[kCount], float divisor) {
  if (divisor == 1.0f) return;
  MOE_A2A_UNROLL
  for (int i = 0; i < kCount; ++i) merged[i] /= divisor;
}

template <int kCount>
MOE_A2A_DEVICE void merge(ReduceOp op, float (&merged)[kCount], const float (&values)[kCount]) {
  with_operator(op, [&](auto kind) {
    MOE_A2A_UNROLL
    for (int i = 0; i < kCount; ++i) merged[i] = decltype(kind)::merge(merged[i], values[i]);
  });
}

// Whether rows that begin at these addresses can be handled in vectors.
MOE_A2A_DEVICE bool are_vectors(const void* a, const void* b) {
  return !kAlignedVectors || (reinterpret_cast<uint64_t>(a) | reinterpret_cast<uint64_t>(b)) % 16 == 0;
}

// The rows that are merged: this rank's values, and those of rank r at `landed` + r * `stride` bytes.
template <class T>
struct MergedRows {
  const T* own;
  const std::byte* landed;
  int64_t stride;
  int rank;

  MOE_A2A_DEVICE const T* operator()(int r) const {
    return r == rank ? own : reinterpret_cast<const T*>(landed + r * stride);
  }
};

// How many vectors of a row a thread loads before it merges the first, beside those of kRowsInFlight - 1 other rows.
inline constexpr int kMergedVectors = kRowsInFlight > 1 ? 2 : 1;

// The vectors at c, c + stride, ... of a row, up to `end`: one thread's.
struct LaneRange {
  int c, stride, end;

  template <class Visit>
  MOE_A2A_DEVICE void visit(const Visit& visit) const {
    MOE_A2A_UNROLL
    for (int v = 0; v < kMergedVectors; ++v) {
      if (v == 0 || c + v * stride < end) visit(v, c + v * stride);
    }
  }
};

template <class T>
struct MergedLanes {
  float value[kMergedVectors][kLaneElements<T>];
};

// Merges these vectors of up to kRowsInFlight rows from row `first` on.
template <class T, class Op, bool kFirst, class Row>
MOE_A2A_DEVICE void merge_rows(int first, int num_rows, const LaneRange& range, const Row& row,
                               MergedLanes<T>& merged) {
  // Set to zero because not all are loaded: else each would keep its last value, in a register or on the stack.
  LoadedLane<T> lane[kRowsInFlight][kMergedVectors] = {};
  MOE_A2A_UNROLL
  for (int i = 0; i < kRowsInFlight; ++i) {
    if (!(kFirst && i == 0) && first + i >= num_rows) continue;
    const T* from = row(first + i);
    range.visit([&](int v, int c) { load_lane(lane[i][v], from + c); });
  }
  MOE_A2A_UNROLL
  for (int i = 0; i < kRowsInFlight; ++i) {
    if (!(kFirst && i == 0) && first + i >= num_rows) continue;
    range.visit([&](int v, int) {
      MOE_A2A_UNROLL
      for (int j = 0; j < kLaneElements<T>; ++j) {
        const float value = value_of(lane[i][v], j);
        merged.value[v][j] = kFirst && i == 0 ? value : Op::merge(merged.value[v][j], value);
      }
    });
  }
}

// Reduces these vectors of all rows, and calls store(c, result) for each.
template <class T, class Op, class Row, class Store>
MOE_A2A_DEVICE void reduce_lanes(int num_rows, float divisor, const LaneRange& range, const Row& row,
                                 const Store& store) {
  MergedLanes<T> merged;
  merge_rows<T, Op, true>(0, num_rows, range, row, merged);
  MOE_A2A_ROLLED
  for (int r = kRowsInFlight; r < num_rows; r += kRowsInFlight)
    merge_rows<T, Op, false>(r, num_rows, range, row, merged);
  range.visit([&](int v, int c) {
    divide(merged.value[v], divisor);
    LaneVector<T> result;
    MOE_A2A_UNROLL
    for (int j = 0; j < kLaneElements<T>; ++j) result.element[j] = from_float<T>(merged.value[v][j]);
    store(c, result);
  });
}

// Elements from `first` on, one at a time: the end of a row, or all of rows that are not vectors. Takes copies, so that
// the rows stay in registers on the common path.
template <class T, class Op, class Group, class Row, class Targets>
MOE_A2A_RARE void reduce_elements(Group group, int num_rows, float divisor, int first, int count, Row row,
                                  Targets targets) {
  for (int c = first + group.rank(); c < count; c += group.size()) {
    float merged = to_float(row(0)[c]);
    MOE_A2A_ROLLED
    for (int r = 1; r < num_rows; ++r) merged = Op::merge(merged, to_float(row(r)[c]));
    const T result = from_float<T>(merged / divisor);
    targets.visit([&](T* target) { target[c] = result; });
  }
}

// Where this rank's result goes: to `target` and, unless null, to `copy`.
template <class T>
struct Targets {
  T* target;
  T* copy = nullptr;

  template <class Visit>
  MOE_A2A_DEVICE void visit(const Visit& visit) const {
    visit(target);
    if (copy != nullptr) visit(copy);
  }
};

// Reduces `count` elements of row(0) ... row(num_rows - 1) into all of `targets`, which may be some of the rows.
// `divisor`: see divisor_of(); `vectors`: see are_vectors().
template <class T, class Op, class Group, class Row, class Targets>
MOE_A2A_DEVICE void reduce_rows(const Group& group, int num_rows, float divisor, int count, bool vectors,
                                const Row& row, const Targets& targets) {
  constexpr int kLane = kLaneElements<T>;
  const int vector_end = vectors ? count / kLane * kLane : 0, stride = group.size() * kLane;
  MOE_A2A_ROLLED
  for (int c = group.rank() * kLane; c < vector_end; c += kMergedVectors * stride) {
    reduce_lanes<T, Op>(num_rows, divisor, {c, stride, vector_end}, row, [&](int at, const LaneVector<T>& result) {
      targets.visit([&](T* target) { store_lane(target + at, result); });
    });
  }
  if (vector_end < count) reduce_elements<T, Op>(group, num_rows, divisor, vector_end, count, row, targets);
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
