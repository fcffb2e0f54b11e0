// What a rank does between the kernels: checks the landed rows, computes on them, and checks the combined result.
// Compiled with -fsanitize=thread, so that the explorer sees its reads.
#include <cmath>

#include "model_rank.h"
#include "model_values.h"
#include "moe/experts/stored_tiles.h"

namespace moe_a2a {

// ---- landed rows

void ModelRank::check_row(int src, int token, int call, const float* row) const {
  for (int c = 0; c < shape_.hidden; ++c) {
    if (row[c] == x_value(src, token, call, c)) continue;
    fail("row of rank " + std::to_string(src) + " token " + std::to_string(token) + " has " + std::to_string(row[c]) +
         " in column " + std::to_string(c) + ", not " + std::to_string(x_value(src, token, call, c)));
  }
}

// Walks the routes in the order that the lists guarantee, (expert, source rank, token, choice), and computes each one.
Launch ModelRank::experts(int call) {
  return launch("experts", call, 1, [this, call](int) {
    raise_early({Field::kDispatchCredit}, call);
    const std::vector<float> y = outputs(call);
    for (size_t i = 0; i < y.size(); ++i) y_[i] = y[i];
  });
}

// Stores tile after tile, like GroupedGemm.
void ModelRank::store_tiles(int call) {
  const std::vector<float> y = outputs(call);
  const int num_positions = context_.region.expert_offsets(buffer(call), context_.config.num_local_experts);
  for (int tile = 0; tile < kTilesOfARow; ++tile) {
    const int first = shape_.hidden * tile / kTilesOfARow, end = shape_.hidden * (tile + 1) / kTilesOfARow;
    for (int i = 0; i < num_positions; ++i) {
      for (int c = first; c < end; ++c) y_[i * shape_.hidden + c] = y[i * shape_.hidden + c];
    }
    StoredTiles::add(stored_tiles_, Block{}, 0, num_positions);
  }
}

std::vector<float> ModelRank::outputs(int call) const {
  std::vector<float> y(context_.config.route_capacity() * shape_.hidden);
  const MoeRegion region = context(call).region;
  const int b = buffer(call), first_expert = rank() * context_.config.num_local_experts;
  int32_t position = 0;
  for (int e = 0; e < context_.config.num_local_experts; ++e) {
    if (region.expert_offsets(b, e) != position) fail("expert_offsets[" + std::to_string(e) + "] is wrong");
    for (int src = 0; src < shape_.num_ranks; ++src) {
      const auto& choices = input(src, call).choices;
      const int arrived = region.num_recv_tokens_per_rank(b, src);
      if (arrived != static_cast<int>(choices.size()))
        fail("table of rank " + std::to_string(src) + " has " + std::to_string(arrived) + " tokens");
      for (int token = 0; token < arrived; ++token) {
        for (int k = 0; k < shape_.num_topk; ++k) {
          if (choices[token][k] != first_expert + e) continue;
          if (region.expert_row_index(b, position) != src * bound(call) + token ||
              region.route_src_rank(b, position) != src || region.route_src_token_idx(b, position) != token ||
              region.route_weights(b, position) != weight_value(src, token, k)) {
            fail("route " + std::to_string(position) + " is wrong");
          }
          const float* row = reinterpret_cast<const float*>(region.row.at(b, src, token));
          check_row(src, token, call, row);
          // Summed by the caller: one row per landed row, as in recv_x.
          const int y_row = shape_.presummed ? src * bound(call) + token : position;
          const float factor = expert_factor(first_expert + e) * (shape_.presummed ? weight_value(src, token, k) : 1);
          for (int c = 0; c < shape_.hidden; ++c) y[y_row * shape_.hidden + c] += row[c] * factor;
          ++position;
        }
      }
    }
  }
  if (region.expert_offsets(b, context_.config.num_local_experts) != position) fail("the number of routes is wrong");
  return y;
}

Launch ModelRank::check_combined(int call) {
  return launch("check_combined", call, 1, [this, call](int) { compare_combined(call); });
}

void ModelRank::compare_combined(int call) const {
  for (int t = 0; t < num_tokens(call); ++t) {
    float factor = 0;
    for (int k = 0; k < shape_.num_topk; ++k) {
      const int expert = input(rank(), call).choices[t][k];
      if (expert >= 0) factor += weight_value(rank(), t, k) * expert_factor(expert);
    }
    // A codec's errors are relative to a block's largest value, which is in the last column.
    const float bound = is_coded(call) ? factor * x_value(rank(), t, call, shape_.hidden - 1) / 100 : 0;
    for (int c = 0; c < shape_.hidden; ++c) {
      const float expected = factor * x_value(rank(), t, call, c), actual = combined_[t * shape_.hidden + c];
      if (std::abs(actual - expected) > bound) {
        fail("combined_x[" + std::to_string(t) + "][" + std::to_string(c) + "] is " + std::to_string(actual) +
             ", not " + std::to_string(expected));
      }
    }
  }
}

}  // namespace moe_a2a
