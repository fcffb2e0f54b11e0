// Weighted sums of rows that a RowReader streams to a warp (arch/streamed_sums.h). Same terms and order as add_rows(),
// so the same bits.
#pragma once

#include "rows/row_sum.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// Whether this target can stream sums of up to `most_terms` rows, one per lane.
MOE_A2A_HOST_DEVICE bool can_stream(int most_terms, bool vector_rows, int64_t row_bytes) {
  return kHasStreams && most_terms <= kWarpSize && vector_rows && row_bytes % 16 == 0;
}

// Forms num_values sums over the rows of `lanes`, ascending, weighted by weight_of(lane). The reader's begin() has been
// called. The sums from value `first` on are stored at open(first), then close(first) is called, kStreamBytes at a
// time.
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
