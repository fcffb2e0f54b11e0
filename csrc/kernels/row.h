// What is done with a row: quantise it, add weighted rows, both by any group of threads.
#pragma once

#include "kernels/args.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// Calls f(T{}) with the element type of `dtype`.
template <class F>
MOE_A2A_DEVICE void with_element_type(DType dtype, F f) {
  switch (dtype) {
    case DType::kFloat32: return f(float{});
    case DType::kFloat16: return f(Half{});
    case DType::kBfloat16: return f(Bfloat16{});
    case DType::kFloat8: return;  // float8 rows are moved, never added
  }
}

// Quantises a row to float8 with one fp32 scale per 128 values into `staged` (row, then scales at scales_offset).
// scale = amax / max, q = x * (max / amax), rounded to nearest even; one thread per block of 128.
template <class T, class Group>
MOE_A2A_DEVICE void quantize_row(const Group& group, const MoeConfig& config, const T* x, std::byte* staged) {
  auto* q = reinterpret_cast<Float8*>(staged);
  auto* scales = reinterpret_cast<float*>(staged + config.scales_offset());
  for (int i = group.rank(); i < config.num_scales(); i += group.size()) {
    const int begin = i * kScaleBlock;
    const int end = begin + kScaleBlock < config.hidden ? begin + kScaleBlock : config.hidden;
    float amax = 1e-12f;
    for (int c = begin; c < end; ++c) {
      const float value = to_float(x[c]);
      const float magnitude = value < 0 ? -value : value;
      amax = magnitude > amax ? magnitude : amax;
    }
    const float inverse = kFloat8Max / amax;
    for (int c = begin; c < end; ++c) q[c] = from_float<Float8>(to_float(x[c]) * inverse);
    scales[i] = amax / kFloat8Max;
  }
}

// target[c] = sum of weight(i) * row(i)[c] over i = 0 .. n-1, added in that order in fp32, each product rounded to fp32
// before it is added (no fused multiply-add: the bits are the same on every target). `row(i)` may be null: skipped.
template <class T, class Group, class Row, class Weight>
MOE_A2A_DEVICE void add_rows(const Group& group, int hidden, bool vector_rows, int n, Row row, Weight weight,
                             T* target) {
  constexpr int kLane = kLaneElements<T>;
  const int vector_end = vector_rows ? hidden / kLane * kLane : 0;
  for (int c = group.rank() * kLane; c < vector_end; c += group.size() * kLane) {
    float sum[kLane] = {};
    for (int i = 0; i < n; ++i) {
      const T* source = row(i);
      if (source == nullptr) continue;
      const float w = weight(i);
      LaneVector<T> v;
      load_lane(v, source + c);
      for (int j = 0; j < kLane; ++j) sum[j] += w * to_float(v.element[j]);
    }
    LaneVector<T> out;
    for (int j = 0; j < kLane; ++j) out.element[j] = from_float<T>(sum[j]);
    store_lane(target + c, out);
  }
  for (int c = vector_end + group.rank(); c < hidden; c += group.size()) {
    float sum = 0;
    for (int i = 0; i < n; ++i) {
      const T* source = row(i);
      if (source != nullptr) sum += weight(i) * to_float(source[c]);
    }
    target[c] = from_float<T>(sum);
  }
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
