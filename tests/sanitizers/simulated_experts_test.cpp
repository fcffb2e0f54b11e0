// Experts that only scale their rows: every landed row's sum, by several blocks and ranks as threads.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "choices.h"
#include "rows_of.h"
#include "seed.h"
#include "thread_ranks.h"

namespace moe_a2a::small_case {
namespace {

// A row is a formula of its rank, token and column; float32 holds every product and sum here exactly.
float value(int rank, int token, int column) { return static_cast<float>(100 * rank + 10 * token + column % 7 + 1); }

class SimulatedExpertsTest : public ::testing::TestWithParam<int> {};

TEST_P(SimulatedExpertsTest, SumsEachLandedRow) {
  const int hidden = GetParam();
  const uint64_t seed = test_seed();
  const MoeConfig config{.num_ranks = kRanks,
                         .num_experts = kExperts,
                         .num_topk = kTopk,
                         .hidden = hidden,
                         .num_max_tokens_per_rank = kTokens,
                         .dtype = DType::kFloat32};
  run_ranks(config, 20.0, [&](ExpertParallel& ep) {
    const int rank = ep.config().rank;
    const Choices mine = draw(seed, rank);
    std::vector<float> x(kTokens * hidden);
    for (int i = 0; i < kTokens * hidden; ++i) x[i] = value(rank, i / hidden, i % hidden);
    const LaunchPlace place{.num_blocks = 3};
    auto handle = ep.dispatch_send({.num_tokens = kTokens,
                                    .topk_idx = {mine.expert.data(), false},
                                    .topk_weights = mine.weight.data(),
                                    .x = rows_of(x, hidden)},
                                   place);
    ep.dispatch_recv(*handle, Layout::kRows, 1, place);
    alignas(16) std::vector<float> sums(kRanks * kTokens * hidden, std::numeric_limits<float>::quiet_NaN());
    ep.simulated_experts(*handle, {.factor = 2}, sums.data(), place);
    for (int r = 0; r < kRanks; ++r) {
      const Choices theirs = draw(seed, r);
      for (int t = 0; t < kTokens; ++t) {
        float weight = 0;
        bool lands = false;
        for (int k = 0; k < kTopk; ++k) {
          const int expert = theirs.expert[t * kTopk + k];
          if (expert < 0 || expert / (kExperts / kRanks) != rank) continue;
          weight += theirs.weight[t * kTopk + k];
          lands = true;
        }
        for (int c = 0; c < hidden; ++c) {
          const float sum = sums[(r * kTokens + t) * hidden + c];
          if (lands) {
            ASSERT_EQ(sum, weight * 2 * value(r, t, c)) << "rank " << r << " token " << t << " column " << c;
          } else {
            ASSERT_TRUE(std::isnan(sum)) << "row of a token that is not here: rank " << r << " token " << t;
          }
        }
      }
    }
    // The same sums, formed as they are sent: each token gets those of both ranks.
    std::vector<float> combined(kTokens * hidden, std::numeric_limits<float>::quiet_NaN());
    ep.combine(*handle, {.simulated = ExpertScales{.factor = 2}}, combined.data(), place);
    for (int t = 0; t < kTokens; ++t) {
      float weight = 0;
      for (int k = 0; k < kTopk; ++k) {
        if (mine.expert[t * kTopk + k] >= 0) weight += mine.weight[t * kTopk + k];
      }
      for (int c = 0; c < hidden; ++c) {
        ASSERT_EQ(combined[t * hidden + c], weight * 2 * value(rank, t, c)) << "token " << t << " column " << c;
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Hidden, SimulatedExpertsTest, ::testing::Values(3, 48, 520));

}  // namespace
}  // namespace moe_a2a::small_case
