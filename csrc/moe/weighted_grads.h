// On request, in the backward pass of a weighted combine: the landed rows of a dispatch are the gradients of its sums.
// Each route's output has its row's gradient times its weight; its weight has the dot product of gradient and output.
#pragma once

#include "comm/work_queue.h"
#include "moe/args.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

struct WeightedGrads {
  using Args = WeightedGradsArgs;
  static constexpr const char* kName = "weighted_grads";

  // One warp per position.
  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte*) {
    const Context& c = args.context;
    const int64_t num_listed = c.region.expert_offsets(args.buffer, c.config.num_local_experts);
    RoundRobin<int64_t> turns(grid.rank() + grid.size() * block.warp_rank(), grid.size() * block.num_warps());
    turns.walk(args.num_positions, [&](int64_t position) {
      // Clamped, since the caller holds a view of the list.
      const int row = position < num_listed ? c.region.expert_row_index(args.buffer, position) : -1;
      with_element_type(c.config.dtype, [&](auto type) {
        using T = decltype(type);
        row < 0 || row >= c.config.row_capacity() ? zero<T>(args, block.warp(), position)
                                                  : store<T>(args, block.warp(), position, row);
      });
      return true;
    });
  }

 private:
  template <class T>
  MOE_A2A_DEVICE static T* grad_at(const Args& args, int64_t position) {
    return reinterpret_cast<T*>(args.grad_y) + position * args.context.config.hidden;
  }

  template <class T>
  MOE_A2A_DEVICE static void zero(const Args& args, const Warp& warp, int64_t position) {
    T* target = grad_at<T>(args, position);
    for (int i = warp.rank(); i < args.context.config.hidden; i += warp.size()) target[i] = from_float<T>(0);
    if (warp.rank() == 0) args.grad_weights[position] = 0;
  }

  template <class T>
  MOE_A2A_DEVICE static void store(const Args& args, const Warp& warp, int64_t position, int row) {
    constexpr int kUnroll = 2 * kLaneUnroll;
    const Context& c = args.context;
    const auto [src_rank, token] = c.config.by_max_tokens.divide(row);
    const T* grad = reinterpret_cast<const T*>(c.region.row.at(args.buffer, src_rank, token));
    const T* y = reinterpret_cast<const T*>(args.y[position]);
    T* target = grad_at<T>(args, position);
    const float weight = args.weights[position];
    const int end = args.vector_rows ? c.config.hidden / kLane<T> * kLane<T> : 0, stride = warp.size() * kLane<T>;
    float dot[kLane<T>] = {};
    int i = warp.rank() * kLane<T>;
    for (; i + (kUnroll - 1) * stride < end; i += kUnroll * stride) {
      store_lanes<kUnroll>(grad + i, y + i, weight, stride, target + i, dot);
    }
    for (; i < end; i += stride) store_lanes<1>(grad + i, y + i, weight, stride, target + i, dot);
    for (i = end + warp.rank(); i < c.config.hidden; i += warp.size()) {
      dot[0] += to_float(grad[i]) * to_float(y[i]);
      target[i] = from_float<T>(to_float(grad[i]) * weight);
    }
    float total = 0;
    for (int j = 0; j < kLane<T>; ++j) total += dot[j];
    total = warp.inclusive_sum(total);
    if (warp.rank() == warp.size() - 1) args.grad_weights[position] = total;
  }

  // `kUnroll` vectors, `stride` values apart: stores grad * weight, adds grad * y to `dot`. All loads come first.
  template <int kUnroll, class T>
  MOE_A2A_DEVICE static void store_lanes(const T* grad, const T* y, float weight, int stride, T* target,
                                         float (&dot)[kLaneElements<T>]) {
    LoadedLane<T> grads[kUnroll], outputs[kUnroll];
    MOE_A2A_UNROLL
    for (int u = 0; u < kUnroll; ++u) {
      load_lane(grads[u], grad + u * stride);
      load_lane(outputs[u], y + u * stride);
    }
    MOE_A2A_UNROLL
    for (int u = 0; u < kUnroll; ++u) {
      LaneVector<T> scaled;
      for (int j = 0; j < kLane<T>; ++j) {
        dot[j] += value_of(grads[u], j) * value_of(outputs[u], j);
        scaled.element[j] = from_float<T>(value_of(grads[u], j) * weight);
      }
      store_lane(target + u * stride, scaled);
    }
  }

  template <class T>
  static constexpr int kLane = kLaneElements<T>;
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
