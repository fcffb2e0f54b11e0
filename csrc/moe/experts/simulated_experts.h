// On request, between dispatch and combine: y = scales[expert] * x, rounded as an expert's output, weighted and summed
// over the experts here. Each landed row is read once and written once, and the host needs no count.
#pragma once

#include "comm/work_queue.h"
#include "moe/experts/simulated_experts_args.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

struct SimulatedExperts {
  using Args = SimulatedExpertsArgs;
  static constexpr const char* kName = "simulated_experts";

  // One warp per piece of a landed row: a small batch has few rows.
  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte*) {
    const Context& c = args.context;
    const RowLayout layout = c.config.row(c.config.dtype);
    const int num_pieces = layout.num_pieces();
    RoundRobin<> turns = make_round_robin(grid, block.warp_rank(), block.num_warps());
    turns.walk(num_landed(args) * num_pieces, [&](int unit) {
      const Piece piece = layout.piece(unit % num_pieces);
      with_element_type(layout.dtype,
                        [&](auto type) { sum<decltype(type)>(args, block.warp(), unit / num_pieces, piece); });
      return true;
    });
  }

 private:
  // The caller holds views of the lists and may have overwritten them. So counts, rows and experts are clamped.
  MOE_A2A_DEVICE static int num_landed(const Args& args) {
    const MoeConfig& config = args.context.config;
    const int64_t listed = args.context.region.landed_offsets(args.buffer, config.num_ranks);
    return static_cast<int>(listed < config.row_capacity() ? listed : config.row_capacity());
  }

  template <class T>
  MOE_A2A_DEVICE static void sum(const Args& args, const Warp& warp, int landed, const Piece& piece) {
    const Context& c = args.context;
    const int row = c.region.landed_row(args.buffer, landed), tokens = c.config.num_max_tokens_per_rank;
    if (row < 0 || row >= c.config.row_capacity()) return;
    const T* x = reinterpret_cast<const T*>(c.region.row.at(args.buffer, row / tokens, row % tokens)) + piece.first;
    T* target = reinterpret_cast<T*>(args.sums) + int64_t{row} * c.config.hidden + piece.first;
    const RouteTerm* terms = c.region.landed_term.at(args.buffer, row);
    constexpr int kLane = kLaneElements<T>;
    const int vector_end = args.vector_rows ? piece.size() / kLane * kLane : 0;
    for (int i = warp.rank() * kLane; i < vector_end; i += warp.size() * kLane) {
      sum_lane(args, terms, x + i, piece.first + i, target + i);
    }
    for (int i = vector_end + warp.rank(); i < piece.size(); i += warp.size()) {
      float total = 0;
      for_each_term(terms, args.context.config.num_topk, [&](const RouteTerm& term) {
        const std::byte* scales = scales_of(args, term);
        total += term.weight * scaled<T>(to_float(x[i]), factor<T>(args, scales, piece.first + i));
      });
      target[i] = from_float<T>(total);
    }
  }

  template <class T>
  MOE_A2A_DEVICE static void sum_lane(const Args& args, const RouteTerm* terms, const T* x, int column, T* target) {
    constexpr int kLane = kLaneElements<T>;
    LoadedLane<T> values;
    load_lane(values, x);
    float total[kLane] = {};
    for_each_term(terms, args.context.config.num_topk, [&](const RouteTerm& term) {
      const std::byte* scales = scales_of(args, term);
      if (args.scales.per_column) {
        LoadedLane<T> factors;
        load_lane(factors, reinterpret_cast<const T*>(scales) + column);
        for (int j = 0; j < kLane; ++j) total[j] += term.weight * scaled<T>(value_of(values, j), value_of(factors, j));
      } else {
        const float by = factor<T>(args, scales, 0);
        for (int j = 0; j < kLane; ++j) total[j] += term.weight * scaled<T>(value_of(values, j), by);
      }
    });
    LaneVector<T> out;
    for (int j = 0; j < kLane; ++j) out.element[j] = from_float<T>(total[j]);
    store_lane(target, out);
  }

  // The scales of the term's expert; null: one factor for all.
  MOE_A2A_DEVICE static const std::byte* scales_of(const Args& args, const RouteTerm& term) {
    return args.scales.data == nullptr ? nullptr : args.scales.of(expert_at(args, term.position));
  }

  template <class T>
  MOE_A2A_DEVICE static float factor(const Args& args, const std::byte* scales, int column) {
    if (scales == nullptr) return args.scales.factor;
    return to_float(reinterpret_cast<const T*>(scales)[args.scales.per_column ? column : 0]);
  }
  template <class T>
  MOE_A2A_DEVICE static float scaled(float value, float by) {
    return to_float(from_float<T>(value * by));
  }

  // The last local expert whose positions begin at or before this one.
  MOE_A2A_DEVICE static int expert_at(const Args& args, int position) {
    const MoeConfig& config = args.context.config;
    int first = 0, last = config.num_local_experts - 1;
    if (args.layout == Layout::kMasked) {
      const int expert = static_cast<int>(position / config.row_capacity());
      return expert < last ? expert : last;
    }
    while (first < last) {
      const int middle = (first + last + 1) / 2;
      if (args.context.region.expert_offsets(args.buffer, middle) <= position) {
        first = middle;
      } else {
        last = middle - 1;
      }
    }
    return first;
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
