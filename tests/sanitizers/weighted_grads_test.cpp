// The kernel of combine's backward pass: gradients of routes' outputs and weights, by several blocks.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "rows_of.h"
#include "seed.h"
#include "thread_ranks.h"

namespace moe_a2a {
namespace {

constexpr int kRanks = 2, kTokens = 7, kExperts = 4;

class WeightedGradsTest : public ::testing::TestWithParam<int> {};

// A token's gradient and the outputs are small integers, so that float32 holds every sum exactly.
TEST_P(WeightedGradsTest, ScalesEachRowAndSumsItsProducts) {
  const int hidden = GetParam();
  const uint64_t seed = test_seed();
  const MoeConfig config{.num_ranks = kRanks,
                         .num_experts = kExperts,
                         .num_topk = 1,
                         .hidden = hidden,
                         .num_max_tokens_per_rank = kTokens,
                         .dtype = DType::kFloat32};
  run_ranks(config, 20.0, [&](ExpertParallel& ep) {
    const auto grad = [&](int rank, int token, int column) {
      return static_cast<float>((17 * rank + 5 * token + column) % 7 - 3);
    };
    const int rank = ep.config().rank;
    std::mt19937_64 random(seed + rank);
    std::vector<int32_t> expert(kTokens);
    for (int32_t& e : expert) e = static_cast<int32_t>(random() % (kExperts + 1)) - 1;
    std::vector<float> grads(kTokens * hidden);
    for (int i = 0; i < kTokens * hidden; ++i) grads[i] = grad(rank, i / hidden, i % hidden);
    const LaunchPlace place{.num_blocks = 3};
    auto handle = ep.dispatch_send(
        {.num_tokens = kTokens, .topk_idx = {expert.data(), false}, .x = rows_of(grads, hidden)}, place);
    ep.dispatch_recv(*handle, Layout::kRows, 1, place);
    const MoeRegion& region = ep.region();
    const int num_routes = region.expert_offsets(handle->buffer, ep.config().num_local_experts),
              num_rows = num_routes + 2;
    alignas(16) std::vector<float> y(num_rows * hidden), grad_y(num_rows * hidden, -1), weights(num_rows),
        sums(num_rows, -1);
    for (float& value : y) value = static_cast<float>(random() % 9) - 4;
    for (float& value : weights) value = static_cast<float>(1 << random() % 3);
    ep.weighted_grads(*handle, {rows_of(y, hidden), weights.data(), num_rows}, grad_y.data(), sums.data(), place);
    for (int position = 0; position < num_rows; ++position) {
      const int row = position < num_routes ? region.expert_row_index(handle->buffer, position) : -1;
      float dot = 0;
      for (int c = 0; c < hidden; ++c) {
        const float value = row < 0 ? 0 : grad(row / kTokens, row % kTokens, c);
        dot += value * y[position * hidden + c];
        ASSERT_EQ(grad_y[position * hidden + c], value * weights[position])
            << "position " << position << " column " << c;
      }
      ASSERT_EQ(sums[position], dot) << "position " << position;
    }
    ep.release(*handle, place);
  });
}

INSTANTIATE_TEST_SUITE_P(Hidden, WeightedGradsTest, ::testing::Values(3, 48, 2100));

}  // namespace
}  // namespace moe_a2a
