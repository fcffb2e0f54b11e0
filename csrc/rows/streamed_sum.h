// Weighted sums of rows that a RowReader brings to a warp (arch/streamed_sums.h): the terms and the order of
// add_rows(), so the same bits.
#pragma once

#include "rows/row_sum.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// Whether sums of up to `most_terms` rows, one per lane, can be streamed on this target.
MOE_A2A_HOST_DEVICE bool can_stream(int most_terms, bool vector_rows, int64_t row_bytes) {
  return kHasStreams && most_terms <= kWarpSize && vector_rows && row_bytes % 16 == 0;
}

// Forms num_values sums over the rows of `lanes`, in ascending order and multiplied by weight_of(lane); the reader has
// begun. The sums from value `first` on are stored at open(first), then close(first) is called, a piece at a time.
template <class T, class Reader, class WeightOf, class Open, class Close>
MOE_A2A_DEVICE void add_streamed(const Warp& warp, Reader& reader, uint32_t lanes, int num_values, WeightOf weight_of,
                                 Open open, Close close) {
  constexpr int kLane = kLaneElements<T>, kStep = kStreamBytes / static_cast<int>(sizeof(T));
  constexpr int kVectors = kStep / kLane / kWarpSize;
  const int lane_first = warp.rank() * kLane, stride = warp.size() * kLane;
  for (int first = 0; first < num_values; first += kStep) {
    float sum[kVectors][kLane] = {};
    for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
      const float weight = weight_of(count_trailing_zeros(rest));
      const T* piece = reinterpret_cast<const T*>(reader.next()) + lane_first;
      LoadedLane<T> loaded[kVectors];  // what lies past a short piece is not stored
      MOE_A2A_UNROLL
      for (int v = 0; v < kVectors; ++v) load_lane(loaded[v], piece + v * stride);
      reader.release();
      MOE_A2A_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        MOE_A2A_UNROLL
        for (int j = 0; j < kLane; ++j) sum[v][j] += weight * value_of(loaded[v], j);
      }
    }
    T* target = open(first);
    MOE_A2A_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      LaneVector<T> out;
      MOE_A2A_UNROLL
      for (int j = 0; j < kLane; ++j) out.element[j] = from_float<T>(sum[v][j]);
      const int c = lane_first + v * stride;
      if (first + c < num_values) store_lane(target + c, out);
    }
    close(first);
  }
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
