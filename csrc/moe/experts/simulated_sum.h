// What simulated experts make of a landed row: y = scales[expert] * x, rounded as an expert's output, weighted and
// summed over the experts here.
#pragma once

#include "moe/experts/simulated_experts_args.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

template <class T>
class SimulatedSum {
 public:
  // Of a row of recv_x, which the caller has clamped to its capacity.
  MOE_A2A_DEVICE SimulatedSum(const Context& c, int buffer, Layout layout, const ExpertScales& scales, int row)
      : c_(c),
        buffer_(buffer),
        layout_(layout),
        scales_(scales),
        x_(reinterpret_cast<const T*>(row_at(c, buffer, row))),
        terms_(c.region.landed_term.at(buffer, row)) {}

  // target[i] = the sum's value piece.first + i, for all i of the piece.
  template <class Group>
  MOE_A2A_DEVICE void store(const Group& group, const Piece& piece, bool vector_rows, T* target) const {
    constexpr int kUnroll = 2 * kLaneUnroll;
    const int vector_end = vector_rows ? piece.size() / kLane * kLane : 0, stride = group.size() * kLane;
    int i = group.rank() * kLane;
    for (; i + (kUnroll - 1) * stride < vector_end; i += kUnroll * stride) {
      store_lanes<kUnroll>(piece.first + i, stride, target + i);
    }
    for (; i < vector_end; i += stride) store_lanes<1>(piece.first + i, stride, target + i);
    for (i = vector_end + group.rank(); i < piece.size(); i += group.size()) {
      float total = 0;
      for_each_term(terms_, c_.config.num_topk, [&](const RouteTerm& term) {
        const float by = factor(scales_of(term), piece.first + i);
        total += term.weight * scaled(to_float(x_[piece.first + i]), by);
      });
      target[i] = from_float<T>(total);
    }
  }

 private:
  static constexpr int kLane = kLaneElements<T>;

  // `kUnroll` vectors, `stride` values apart. Issues all loads of x before the first use.
  template <int kUnroll>
  MOE_A2A_DEVICE void store_lanes(int column, int stride, T* target) const {
    LoadedLane<T> x[kUnroll];
    MOE_A2A_UNROLL
    for (int u = 0; u < kUnroll; ++u) load_lane(x[u], x_ + column + u * stride);
    float total[kUnroll][kLane] = {};
    for_each_term(terms_, c_.config.num_topk, [&](const RouteTerm& term) {
      const std::byte* scales = scales_of(term);
      if (scales_.per_column) {
        MOE_A2A_UNROLL
        for (int u = 0; u < kUnroll; ++u) {
          LoadedLane<T> by;
          load_lane(by, reinterpret_cast<const T*>(scales) + column + u * stride);
          for (int j = 0; j < kLane; ++j) total[u][j] += term.weight * scaled(value_of(x[u], j), value_of(by, j));
        }
      } else {
        const float by = factor(scales, 0);
        MOE_A2A_UNROLL
        for (int u = 0; u < kUnroll; ++u) {
          for (int j = 0; j < kLane; ++j) total[u][j] += term.weight * scaled(value_of(x[u], j), by);
        }
      }
    });
    MOE_A2A_UNROLL
    for (int u = 0; u < kUnroll; ++u) {
      LaneVector<T> out;
      for (int j = 0; j < kLane; ++j) out.element[j] = from_float<T>(total[u][j]);
      store_lane(target + u * stride, out);
    }
  }

  MOE_A2A_DEVICE static const std::byte* row_at(const Context& c, int buffer, int row) {
    const auto [src_rank, token] = c.config.by_max_tokens.divide(row);
    return c.region.row.at(buffer, src_rank, token);
  }

  // The scales of the term's expert; null: one factor for all.
  MOE_A2A_DEVICE const std::byte* scales_of(const RouteTerm& term) const {
    return scales_.data == nullptr ? nullptr : scales_.of(expert_at(term.position));
  }
  MOE_A2A_DEVICE float factor(const std::byte* scales, int column) const {
    if (scales == nullptr) return scales_.factor;
    return to_float(reinterpret_cast<const T*>(scales)[scales_.per_column ? column : 0]);
  }
  MOE_A2A_DEVICE static float scaled(float value, float by) { return to_float(from_float<T>(value * by)); }

  // The last local expert whose positions begin at or before this one.
  MOE_A2A_DEVICE int expert_at(int position) const {
    const MoeConfig& config = c_.config;
    int first = 0, last = config.num_local_experts - 1;
    if (layout_ == Layout::kMasked) {
      const int expert = static_cast<int>(position / config.row_capacity());
      return expert < last ? expert : last;
    }
    while (first < last) {
      const int middle = (first + last + 1) / 2;
      if (c_.region.expert_offsets(buffer_, middle) <= position) {
        first = middle;
      } else {
        last = middle - 1;
      }
    }
    return first;
  }

  const Context& c_;
  int buffer_;
  Layout layout_;
  const ExpertScales& scales_;
  const T* x_;
  const RouteTerm* terms_;
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
