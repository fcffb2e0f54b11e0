// Weighted sums of rows: formed by any group of threads with per-thread loads and stores, or by a warp from rows that a
// RowReader streams to it (arch/streamed_sums.h). Same terms, same order, same bits.
#pragma once

#include "rows/row_layout.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// A summand: a row and its weight. A list of terms is an object whose next() returns one term after another, and terms
// without a row past the last.
template <class T>
struct Term {
  const T* row = nullptr;
  float weight = 0;
};

// The terms of a list from column `first` on: the first few are held in registers for all columns, the rest is re-read.
template <class T, class List>
struct Terms {
  Term<T> held[kRowsInFlight];
  List rest;
  int first;

  MOE_A2A_DEVICE Terms(const List& list, int first) : rest(list), first(first) {
    MOE_A2A_UNROLL
    for (int i = 0; i < kRowsInFlight; ++i) held[i] = next(rest);
  }
  MOE_A2A_DEVICE Term<T> next(List& list) const {
    Term<T> term = list.next();
    if (term.row != nullptr) term.row += first;
    return term;
  }
  MOE_A2A_DEVICE bool has_rest() const { return held[kRowsInFlight - 1].row != nullptr; }
};

// Adds the first kNum terms at column c to the sums. Issues all loads before the first use.
template <int kNum, int kUnroll, class T, class Sums>
MOE_A2A_DEVICE void add_exactly(const Term<T>* terms, int c, int stride, Sums& sum) {
  LoadedLane<T> lane[kNum][kUnroll];
  MOE_A2A_UNROLL
  for (int i = 0; i < kNum; ++i) {
    for (int u = 0; u < kUnroll; ++u) load_lane(lane[i][u], terms[i].row + c + u * stride);
  }
  MOE_A2A_UNROLL
  for (int i = 0; i < kNum; ++i) {
    for (int u = 0; u < kUnroll; ++u) {
      for (int j = 0; j < kLaneElements<T>; ++j) sum[u][j] += terms[i].weight * value_of(lane[i][u], j);
    }
  }
}

// Adds those of the first kNum terms that have a row; they come first. One branch per count keeps the loads together.
template <int kNum, int kUnroll, class T, class Sums>
MOE_A2A_DEVICE void add_up_to(const Term<T>* terms, int c, int stride, Sums& sum) {
  if (terms[kNum - 1].row != nullptr) return add_exactly<kNum, kUnroll>(terms, c, stride, sum);
  if constexpr (kNum > 1) add_up_to<kNum - 1, kUnroll>(terms, c, stride, sum);
}

// One thread's `kUnroll` vectors, `stride` elements apart, of the sum: at most kMost held terms, then the rest in
// rounds of kMost.
template <int kMost, int kUnroll, class T, class List>
MOE_A2A_DEVICE void add_lanes(const Terms<T, List>& terms, int c, int stride, T* target) {
  float sum[kUnroll][kLaneElements<T>] = {};
  List rest = terms.rest;
  Term<T> now[kMost];
  // One rolled loop for both. With the first round apart, nvcc's code grows by a fifth and clang for AMD stops
  // inlining; clang 22 crashes on `while (true)` here.
  MOE_A2A_ROLLED
  for (bool are_held = true; are_held || (kMost == kRowsInFlight && now[kMost - 1].row != nullptr); are_held = false) {
    MOE_A2A_UNROLL
    for (int i = 0; i < kMost; ++i) now[i] = are_held ? terms.held[i] : terms.next(rest);
    add_up_to<kMost, kUnroll>(now, c, stride, sum);
  }
  for (int u = 0; u < kUnroll; ++u) {
    LaneVector<T> out;
    for (int j = 0; j < kLaneElements<T>; ++j) out.element[j] = from_float<T>(sum[u][j]);
    store_lane(target + c + u * stride, out);
  }
}

// This thread's columns of [c, end), as long as kUnroll vectors fit; returns where to continue.
template <int kMost, int kUnroll, class T, class List>
MOE_A2A_DEVICE int add_columns(const Terms<T, List>& terms, int c, int end, int stride, T* target) {
  for (; c + (kUnroll - 1) * stride + kLaneElements<T> <= end; c += kUnroll * stride) {
    add_lanes<kMost, kUnroll>(terms, c, stride, target);
  }
  return c;
}

// target[i] = sum of weight * row[piece.first + i] over the list, for all i of the piece. Added in list order in fp32,
// each product rounded to fp32 before it is added: no fused multiply-add, so the bits are the same on every target.
template <class T, class Group, class List>
MOE_A2A_DEVICE void add_rows(const Group& group, const Piece& piece, bool vector_rows, const List& list, T* target) {
  constexpr int kLane = kLaneElements<T>, kFew = (kRowsInFlight + 1) / 2;
  const Terms<T, List> terms(list, piece.first);
  const int stride = group.size() * kLane;
  const int vector_end = vector_rows ? piece.size() / kLane * kLane : 0;
  int c = group.rank() * kLane;
  // With few terms, twice the unrolling keeps as many loads in flight.
  if (kFew == kRowsInFlight || terms.held[kFew].row == nullptr) {
    c = add_columns<kFew, 2 * kLaneUnroll>(terms, c, vector_end, stride, target);
  }
  c = add_columns<kRowsInFlight, kLaneUnroll>(terms, c, vector_end, stride, target);
  add_columns<kRowsInFlight, 1>(terms, c, vector_end, stride, target);
  for (c = vector_end + group.rank(); c < piece.size(); c += group.size()) {
    float sum = 0;
    List rest = list;
    for (Term<T> term = terms.next(rest); term.row != nullptr; term = terms.next(rest)) {
      sum += term.weight * to_float(term.row[c]);
    }
    target[c] = from_float<T>(sum);
  }
}

// ---- streamed

// Whether this target can stream sums of up to `most_terms` rows, one per lane.
MOE_A2A_HOST_DEVICE bool can_stream(int most_terms, bool vector_rows, int64_t row_bytes) {
  return kHasStreams && most_terms <= kWarpSize && vector_rows && row_bytes % 16 == 0;
}

// A lane's sums of one step, kStreamBytes of rows: element j of vector v belongs to value
// (v * warp.size() + warp.rank()) * kLaneElements<T> + j of the step.
template <class T>
inline constexpr int kStreamVectors = kStreamBytes / static_cast<int>(sizeof(T)) / kLaneElements<T> / kWarpSize;
template <class T>
using StreamedSums = float[kStreamVectors<T>][kLaneElements<T>];

// Forms num_values sums over the rows of `lanes`, ascending, weighted by weight_of(lane). The reader's begin() has been
// called. Calls store(first, sums) for each step; sums past num_values mean nothing.
template <class T, class Reader, class WeightOf, class Store>
MOE_A2A_DEVICE void add_streamed(const Warp& warp, Reader& reader, uint32_t lanes, int num_values, WeightOf weight_of,
                                 Store store) {
  constexpr int kLane = kLaneElements<T>, kStep = kStreamBytes / static_cast<int>(sizeof(T));
  constexpr int kVectors = kStreamVectors<T>;
  const int lane_first = warp.rank() * kLane, stride = warp.size() * kLane;
  for (int first = 0; first < num_values; first += kStep) {
    StreamedSums<T> sum = {};
    for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
      const float weight = weight_of(count_trailing_zeros(rest));
      const T* piece = reinterpret_cast<const T*>(reader.next()) + lane_first;
      LoadedLane<T> loaded[kVectors];  // values past a short piece are not stored
      MOE_A2A_UNROLL
      for (int v = 0; v < kVectors; ++v) load_lane(loaded[v], piece + v * stride);
      reader.release();
      MOE_A2A_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        MOE_A2A_UNROLL
        for (int j = 0; j < kLane; ++j) sum[v][j] += weight * value_of(loaded[v], j);
      }
    }
    store(first, sum);
  }
}

// Stores the sums of a step, the first num_values of them.
template <class T>
MOE_A2A_DEVICE void store_streamed(const Warp& warp, const StreamedSums<T>& sum, int num_values, T* target) {
  MOE_A2A_UNROLL
  for (int v = 0; v < kStreamVectors<T>; ++v) {
    LaneVector<T> out;
    MOE_A2A_UNROLL
    for (int j = 0; j < kLaneElements<T>; ++j) out.element[j] = from_float<T>(sum[v][j]);
    const int c = (v * warp.size() + warp.rank()) * kLaneElements<T>;
    if (c < num_values) store_lane(target + c, out);
  }
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
