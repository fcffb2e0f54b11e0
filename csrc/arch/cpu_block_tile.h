// The CPU's BlockTile: dot products in vector loops. See block_tile.h.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "arch/block_tile.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

template <class T>
struct BlockTile {
  static constexpr bool kIsScaled = std::is_same_v<T, Float8>;
  static constexpr int kRows = 64, kColumns = kIsScaled ? kScaleDepth : 64;

 private:
  static constexpr int kDepth = 512;            // summed at a time: rows of A as floats stay in L2
  static constexpr int kLanes = 16, kSide = 4;  // partial sums of a dot product; rows of A that share a row of B
  struct Shared {
    float a[kRows][kDepth], b[kDepth], sum[2 * kColumns][kRows];
  };

 public:
  static constexpr int64_t kSharedBytes = sizeof(Shared);

  template <class RowOfA, class RowOfB, class Store, class Scales = NoScales>
  static void multiply(const Block&, std::byte* memory, int num_rows, int depth, RowOfA row_of_a, RowOfB row_of_b,
                       Store store, Scales scales = {}) {
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    std::memset(shared.sum, 0, sizeof(shared.sum));
    for (int begin = 0; begin < depth; begin += kDepth) {
      const int count = std::min(kDepth, depth - begin);
      const int padded = (num_rows + kSide - 1) / kSide * kSide;
      for (int i = 0; i < padded; ++i) {
        widen(shared.a[i], i < num_rows ? row_of_a(i) : nullptr, begin, count);
        if constexpr (kIsScaled) scale(shared.a[i], i < num_rows ? scales.of_row(i) : nullptr, begin, count);
      }
      for (int j = 0; j < 2 * kColumns; ++j) {
        const T* b = row_of_b(j / kColumns, j % kColumns);
        if (b == nullptr) continue;
        widen(shared.b, b, begin, count);
        if constexpr (kIsScaled) scale(shared.b, scales.of_columns(j / kColumns), begin, count);
        for (int i = 0; i < padded; i += kSide) add_products(shared, i, j, count);
      }
    }
    for (int j = 0; j < kColumns; ++j) {
      for (int i = 0; i < num_rows; ++i) store(i, j, shared.sum[j][i], shared.sum[kColumns + j][i]);
    }
  }

 private:
  static void widen(float* to, const T* row, int begin, int count) {
    for (int k = 0; k < count; ++k) to[k] = row == nullptr ? 0.0f : to_float(row[begin + k]);
  }

  // `begin` is a multiple of kScaleDepth.
  static void scale(float* values, const float* scales, int begin, int count) {
    if (scales == nullptr) return;
    for (int first = 0; first < count; first += kScaleDepth) {
      const float factor = scales[(begin + first) / kScaleDepth];
      for (int k = first; k < std::min(first + kScaleDepth, count); ++k) values[k] *= factor;
    }
  }

  // `count` is a multiple of kLanes. Partial sums are added in a fixed order.
  static void add_products(Shared& shared, int i, int j, int count) {
    float partial[kSide][kLanes] = {};
    for (int k = 0; k < count; k += kLanes) {
      for (int side = 0; side < kSide; ++side) {
        for (int lane = 0; lane < kLanes; ++lane) {
          partial[side][lane] += shared.a[i + side][k + lane] * shared.b[k + lane];
        }
      }
    }
    for (int side = 0; side < kSide; ++side) {
      float sum = 0;
      for (int lane = 0; lane < kLanes; ++lane) sum += partial[side][lane];
      shared.sum[j][i + side] += sum;
    }
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
