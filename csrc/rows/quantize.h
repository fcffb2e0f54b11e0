// Quantises pieces of rows to float8 with one fp32 scale per 128 values: scale = amax / max, q = x * (max / amax),
// rounded to nearest even.
#pragma once

#include "rows/row_layout.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// Quantises a piece of the row `x` into the piece's values `q` and scales. Each thread holds a few consecutive values;
// the threads that share a block of 128 reduce to its amax.
template <class T, class Group>
class PieceQuantizer {
 public:
  MOE_A2A_DEVICE PieceQuantizer(const Group& group, const Piece& piece, const T* x, Float8* q, float* scales)
      : group_(group),
        size_(piece.size()),
        stride_(group.size() * kCount),
        x_(x + piece.first),
        q_(q),
        scales_(scales) {}

  // Calls formed(n) each time that the group has stored more of `q`: its first n values.
  template <class Formed>
  MOE_A2A_DEVICE void run(bool vector_rows, const Formed& formed) {
    if (vector_rows) whole_steps<kQuantizeUnroll>(formed);
    // All threads run the same number of steps: those past the end contribute zeros to largest_magnitude().
    const int padded = (size_ + kScaleBlock - 1) / kScaleBlock * kScaleBlock;
    for (; base_ < padded; base_ += stride_) last_step(padded);
  }

 private:
  static constexpr int kCount = kQuantizeElements<T>, kLanes = kScaleBlock / kCount;
  static constexpr int kLane = kLaneElements<T>, kVectors = (kCount + kLane - 1) / kLane;
  static_assert(kCount % 2 == 0 && (kVectors == 1 || kCount % kLane == 0));

  // Steps in which every thread has kUnroll full sets of values. Issues all loads before the first use.
  template <int kUnroll, class Formed>
  MOE_A2A_DEVICE void whole_steps(const Formed& formed) {
    for (; base_ + kUnroll * stride_ <= size_; base_ += kUnroll * stride_) {
      LoadedLane<T> loaded[kUnroll][kVectors];
      const int first = base_ + group_.rank() * kCount;
      MOE_A2A_UNROLL
      for (int u = 0; u < kUnroll; ++u) {
        for (int v = 0; v < kVectors; ++v) load_lane(loaded[u][v], x_ + first + u * stride_ + v * kLane);
      }
      MOE_A2A_UNROLL
      for (int u = 0; u < kUnroll; ++u) {
        float values[kCount];
        MOE_A2A_UNROLL
        for (int i = 0; i < kCount; ++i) values[i] = value_of(loaded[u][i / kLane], i % kLane);
        Float8 quantized[kCount];
        quantize(values, first + u * stride_, quantized);
        store_values(q_ + first + u * stride_, quantized);
      }
      formed(base_ + kUnroll * stride_);
    }
    if constexpr (kUnroll > 1) whole_steps<kUnroll / 2>(formed);
  }

  MOE_A2A_DEVICE void last_step(int padded) {
    const int first = base_ + group_.rank() * kCount;
    float values[kCount];
    for (int i = 0; i < kCount; ++i) values[i] = first + i < size_ ? to_float(x_[first + i]) : 0.0f;
    Float8 quantized[kCount];
    quantize(values, first < padded ? first : -1, quantized);
    for (int i = 0; i < kCount && first + i < size_; ++i) q_[first + i] = quantized[i];
  }

  // The first thread of a block of 128 also writes the scale. `first`: index of the values; -1: past the end.
  MOE_A2A_DEVICE void quantize(const float (&values)[kCount], int first, Float8 (&quantized)[kCount]) {
    const float amax = group_.template largest_magnitude<kLanes>(values, 1e-12f);
    to_float8(values, kFloat8Max / amax, quantized);
    if (first >= 0 && first % kScaleBlock == 0) scales_[first / kScaleBlock] = amax / kFloat8Max;
  }

  const Group& group_;
  int size_, stride_;
  const T* x_;
  Float8* q_;
  float* scales_;
  int base_ = 0;
};

// `formed`: see PieceQuantizer::run().
template <class T, class Group, class Formed>
MOE_A2A_DEVICE void quantize_piece(const Group& group, const Piece& piece, bool vector_rows, const T* x, Float8* q,
                                   float* scales, const Formed& formed) {
  PieceQuantizer<T, Group>(group, piece, x, q, scales).run(vector_rows, formed);
}
template <class T, class Group>
MOE_A2A_DEVICE void quantize_piece(const Group& group, const Piece& piece, bool vector_rows, const T* x, Float8* q,
                                   float* scales) {
  quantize_piece(group, piece, vector_rows, x, q, scales, [](int) {});
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
