// The sum of rows, formed by a warp as its RowReader brings them. The same terms in the same order as in add_rows(), so
// the same bits.
#pragma once

#include "rows/row.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// Whether sums of so many terms, one to a lane, can be streamed on this target.
MOE_A2A_HOST_DEVICE bool can_stream(int most_terms, bool vector_rows, int64_t row_bytes) {
  return RowReader::kIsThere && most_terms <= kWarpSize && vector_rows && row_bytes % 16 == 0;
}

// Forms num_values sums of the rows of `lanes`, in ascending order with weight_of(lane) as a factor, as the reader
// brings them; it has begun. A piece at a time: the one from value `first` on is put to open(first), then close(first).
template <class T, class WeightOf, class Open, class Close>
MOE_A2A_DEVICE void add_streamed(const Warp& warp, RowReader& reader, uint32_t lanes, int num_values,
                                 WeightOf weight_of, Open open, Close close) {
  if constexpr (!RowReader::kIsThere) return;
  constexpr int kLane = kLaneElements<T>, kStep = kStreamBytes / static_cast<int>(sizeof(T));
  constexpr int kVectors = kStep / kLane / kWarpSize;
  const int lane_first = warp.rank() * kLane, stride = warp.size() * kLane;
  for (int first = 0; first < num_values; first += kStep) {
    float sum[kVectors][kLane] = {};
    for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
      const float weight = weight_of(count_trailing_zeros(rest));
      const T* piece = reinterpret_cast<const T*>(reader.next()) + lane_first;
      LoadedLane<T> loaded[kVectors];  // what lies behind a short piece is not stored
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
