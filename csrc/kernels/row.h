// What is done with a row: quantise it, add weighted rows, both by any group of threads.
#pragma once

#include "kernels/args.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// Calls f(T{}) with the element type of `dtype`.
template <class F>
MOE_A2A_DEVICE void with_element_type(DType dtype, F f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(float{});
    case DType::kFloat16:
      return f(Half{});
    case DType::kBfloat16:
      return f(Bfloat16{});
    case DType::kFloat8:
      return;  // float8 rows are moved, never added
  }
}

// A row that is too long for the staging of one warp goes without: 0.
MOE_A2A_HOST_DEVICE int64_t staging_that_fits(int64_t num_bytes) {
  return num_bytes <= static_cast<int64_t>(kMaxSharedBytes) ? num_bytes : 0;
}

// ---- quantisation

MOE_A2A_DEVICE float magnitude(float value) { return value < 0 ? -value : value; }

// Quantises a row to float8 with one fp32 scale per 128 values into `staged` (row, then scales at scales_offset).
// scale = amax / max, q = x * (max / amax), rounded to nearest even. Each thread has a few neighbouring values, and
// neighbouring threads share a block of 128: they meet through the largest magnitude among them.
template <class T, class Group>
MOE_A2A_DEVICE void quantize_row(const Group& group, const MoeConfig& config, bool vector_rows, const T* x,
                                 std::byte* staged) {
  constexpr int kCount = kQuantizeElements<T>, kLanes = kScaleBlock / kCount;
  auto* q = reinterpret_cast<Float8*>(staged);
  auto* scales = reinterpret_cast<float*>(staged + config.scales_offset());
  const int padded = config.num_scales() * kScaleBlock;
  // Every thread goes round equally often: those past the end take part in max_of_neighbours() with zeros.
  const int stride = group.size() * kCount;
  for (int base = 0; base < padded; base += stride) {
    const int c = base + group.rank() * kCount;
    T values[kCount] = {};
    if (vector_rows && c + kCount <= config.hidden) {
      load_values(values, x + c);
    } else {
      for (int i = 0; i < kCount && c + i < config.hidden; ++i) values[i] = x[c + i];
    }
    float amax = 1e-12f;
    for (int i = 0; i < kCount; ++i) {
      const float value = magnitude(to_float(values[i]));
      amax = value > amax ? value : amax;
    }
    amax = group.template max_of_neighbours<kLanes>(amax);
    const float inverse = kFloat8Max / amax;
    Float8 quantized[kCount];
    for (int i = 0; i < kCount; ++i) quantized[i] = from_float<Float8>(to_float(values[i]) * inverse);
    if (c + kCount <= config.hidden) {
      store_values(q + c, quantized);
    } else {
      for (int i = 0; i < kCount && c + i < config.hidden; ++i) q[c + i] = quantized[i];
    }
    if (c < padded && c % kScaleBlock == 0) scales[c / kScaleBlock] = amax / kFloat8Max;
  }
}

// ---- addition

// Rows to be added up, in this order: a list in shared memory that all threads of a group read.
template <class T>
struct Terms {
  const T** row;  // [n]
  float* weight;  // [n]
  int n;

  MOE_A2A_HOST_DEVICE static size_t bytes(int capacity) {
    return (capacity * (sizeof(T*) + sizeof(float)) + 15) / 16 * 16;
  }
};

// Fills `memory` with the terms i = 0 ... capacity - 1 whose row(i) is not null.
template <class T, class Group, class Row, class Weight>
MOE_A2A_DEVICE Terms<T> make_terms(const Group& group, std::byte* memory, int capacity, Row row, Weight weight) {
  Terms<T> terms{reinterpret_cast<const T**>(memory), reinterpret_cast<float*>(memory + capacity * sizeof(T*)), 0};
  group.sync();  // the terms of the row before are no longer read
  for (int i = group.rank(); i < capacity; i += group.size()) {
    terms.row[i] = row(i);
    terms.weight[i] = weight(i);
  }
  group.sync();
  // Every thread counts, one moves: the others wait for it below.
  for (int i = 0; i < capacity; ++i) terms.n += terms.row[i] != nullptr;
  group.sync();
  if (group.rank() == 0) {
    for (int i = 0, n = 0; n < terms.n; ++i) {
      if (terms.row[i] == nullptr) continue;
      terms.row[n] = terms.row[i];
      terms.weight[n++] = terms.weight[i];
    }
  }
  group.sync();
  return terms;
}

// One thread's `kUnroll` pieces of the sum, `stride` elements apart: that many loads are in flight at a time.
template <int kUnroll, class T>
MOE_A2A_DEVICE void add_pieces(const Terms<T>& terms, int c, int stride, T* target) {
  constexpr int kLane = kLaneElements<T>;
  float sum[kUnroll][kLane] = {};
  for (int i = 0; i < terms.n; ++i) {
    const T* source = terms.row[i] + c;
    const float weight = terms.weight[i];
    LoadedLane<T> piece[kUnroll];
    for (int u = 0; u < kUnroll; ++u) load_lane(piece[u], source + u * stride);
    for (int u = 0; u < kUnroll; ++u) {
      for (int j = 0; j < kLane; ++j) sum[u][j] += weight * to_float(piece[u].element[j]);
    }
  }
  for (int u = 0; u < kUnroll; ++u) {
    LaneVector<T> out;
    for (int j = 0; j < kLane; ++j) out.element[j] = from_float<T>(sum[u][j]);
    store_lane(target + c + u * stride, out);
  }
}

// target[c] = sum of weight[i] * row[i][c] over the terms, added in their order in fp32, each product rounded to fp32
// before it is added (no fused multiply-add: the bits are the same on every target).
template <class T, class Group>
MOE_A2A_DEVICE void add_rows(const Group& group, int hidden, bool vector_rows, const Terms<T>& terms, T* target) {
  constexpr int kLane = kLaneElements<T>;
  const int stride = group.size() * kLane;
  const int vector_end = vector_rows ? hidden / kLane * kLane : 0;
  int c = group.rank() * kLane;
  for (; c + (kLaneUnroll - 1) * stride + kLane <= vector_end; c += kLaneUnroll * stride) {
    add_pieces<kLaneUnroll>(terms, c, stride, target);
  }
  for (; c + kLane <= vector_end; c += stride) add_pieces<1>(terms, c, stride, target);
  for (c = vector_end + group.rank(); c < hidden; c += group.size()) {
    float sum = 0;
    for (int i = 0; i < terms.n; ++i) sum += terms.weight[i] * to_float(terms.row[i][c]);
    target[c] = from_float<T>(sum);
  }
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
