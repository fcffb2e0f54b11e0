// The kernels that return landed rows, their choices and weights, or take weights: by several blocks, with ranks as
// threads.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "choices.h"
#include "moe/route/run_topk_layout.h"
#include "rows_of.h"
#include "seed.h"
#include "thread_ranks.h"

namespace moe_a2a::small_case {
namespace {

constexpr int kLocalExperts = kExperts / kRanks, kHidden = 4, kRows = kRanks * kTokens;
constexpr LaunchPlace kPlace{.num_blocks = 3};

// (local expert, weight) of each choice of a row on `rank`; expert -1: elsewhere.
std::vector<std::pair<int, float>> choices_of_row(uint64_t seed, int rank, int row) {
  const Choices all = draw(seed, row / kTokens);
  std::vector<std::pair<int, float>> choices;
  for (int k = 0; k < kTopk; ++k) {
    const int at = row % kTokens * kTopk + k, expert = all.expert[at];
    const bool is_here = expert >= 0 && expert / kLocalExperts == rank;
    choices.push_back(is_here ? std::pair{expert % kLocalExperts, all.weight[at]} : std::pair{-1, 0.0f});
  }
  return choices;
}
int num_here(const std::vector<std::pair<int, float>>& choices) {
  int num = 0;
  for (const auto& [expert, weight] : choices) num += expert >= 0;
  return num;
}

// All values of a row of recv_x.
float value_of(int row) { return static_cast<float>(row + 1); }

// The parameter: num_max_ll_tokens. Choices travel as LL words, or in tables.
class LocalKernelsTest : public ::testing::TestWithParam<int> {
 protected:
  // Calls body(ep, handle) on each rank, with its tokens dispatched.
  void with_dispatch(uint64_t seed, const std::vector<float>* weights,
                     const std::function<void(ExpertParallel& ep, DispatchHandle& handle)>& body) {
    const MoeConfig config{.num_ranks = kRanks,
                           .num_experts = kExperts,
                           .num_topk = kTopk,
                           .hidden = kHidden,
                           .num_max_tokens_per_rank = kTokens,
                           .dtype = DType::kFloat32,
                           .num_max_ll_tokens = GetParam()};
    run_ranks(config, 20.0, [&](ExpertParallel& ep) {
      const Choices mine = draw(seed, ep.config().rank);
      std::vector<float> x(kTokens * kHidden);
      for (int i = 0; i < kTokens * kHidden; ++i) x[i] = value_of(ep.config().rank * kTokens + i / kHidden);
      const auto handle = ep.dispatch_send({.num_tokens = kTokens,
                                            .topk_idx = {mine.expert.data(), false},
                                            .topk_weights = (weights ? *weights : mine.weight).data(),
                                            .x = rows_of(x, kHidden)},
                                           kPlace);
      ep.dispatch_recv(*handle, Layout::kRows, 1, kPlace);
      body(ep, *handle);
      ep.release(*handle, kPlace);
    });
  }
};

TEST_P(LocalKernelsTest, ReturnTheExpertsOfEveryRow) {
  const uint64_t seed = test_seed();
  with_dispatch(seed, nullptr, [&](ExpertParallel& ep, DispatchHandle& handle) {
    std::vector<int32_t> ids(kRows * kTopk, 99);
    std::vector<float> weights(kRows * kTopk, -1);
    ep.recv_topk(handle,
                 {.wide_ids = false,
                  .num_rows = kRows,
                  .first_expert = 100,
                  .no_expert = -7,
                  .ids = ids.data(),
                  .weights = weights.data()},
                 kPlace);
    for (int row = 0; row < kRows; ++row) {
      int column = 0;
      for (const auto& [expert, weight] : choices_of_row(seed, ep.config().rank, row)) {
        if (expert < 0) continue;
        EXPECT_EQ(ids[row * kTopk + column], 100 + expert) << "row " << row << " column " << column;
        EXPECT_EQ(weights[row * kTopk + column++], weight) << "row " << row;
      }
      for (; column < kTopk; ++column) {
        EXPECT_EQ(ids[row * kTopk + column], -7) << "row " << row << " column " << column;
        EXPECT_EQ(weights[row * kTopk + column], 0) << "row " << row << " column " << column;
      }
    }
  });
}

TEST_P(LocalKernelsTest, FillTheRowsWithExpertsOfOtherRanksInTurn) {
  with_dispatch(test_seed(), nullptr, [&](ExpertParallel& ep, DispatchHandle& handle) {
    const int first = ep.config().rank * kLocalExperts, num_experts = ep.config().num_experts;
    std::vector<int64_t> ids(kRows * kTopk, 99);
    std::vector<float> weights(kRows * kTopk, -1);
    ep.recv_topk(handle,
                 {.num_rows = kRows,
                  .first_expert = first,
                  .others_in_turn = true,
                  .ids = ids.data(),
                  .weights = weights.data()},
                 kPlace);
    for (int i = 0; i < kRows * kTopk; ++i) {
      if (ids[i] >= first && ids[i] < first + kLocalExperts) continue;
      const int turn = i % (num_experts - kLocalExperts);
      EXPECT_EQ(ids[i], (first + kLocalExperts + turn) % num_experts) << "id " << i;
      EXPECT_EQ(weights[i], 0) << "id " << i;
    }
  });
}

TEST_P(LocalKernelsTest, ReturnTheChoicesOfPackedRows) {
  const uint64_t seed = test_seed();
  with_dispatch(seed, nullptr, [&](ExpertParallel& ep, DispatchHandle& handle) {
    const int rank = ep.config().rank;
    std::vector<int64_t> ids(kRows * kTopk, 99), row_index(kRows, -5);
    std::vector<float> weights(kRows * kTopk, -1);
    std::vector<int32_t> sum_index(kRows, -5), numbers(kRanks + kLocalExperts, -5);
    ep.recv_topk(handle,
                 {.packed = true,
                  .num_rows = kRows,
                  .ids = ids.data(),
                  .weights = weights.data(),
                  .row_index = row_index.data(),
                  .sum_index = sum_index.data(),
                  .numbers = numbers.data()},
                 kPlace);
    std::vector<int32_t> expected(kRanks + kLocalExperts, 0);
    int64_t at = 0;
    for (int row = 0; row < kRows; ++row) {
      const auto choices = choices_of_row(seed, rank, row);
      if (num_here(choices) == 0) continue;
      ASSERT_EQ(row_index[at], row);
      EXPECT_EQ(sum_index[row], at);
      for (int k = 0; k < kTopk; ++k) {
        EXPECT_EQ(ids[at * kTopk + k], choices[k].first) << "row " << row << " choice " << k;
        EXPECT_EQ(weights[at * kTopk + k], choices[k].second) << "row " << row << " choice " << k;
        if (choices[k].first >= 0) ++expected[kRanks + choices[k].first];
      }
      ++at;
      for (int r = row / kTokens; r < kRanks; ++r) expected[r] = static_cast<int32_t>(at);
    }
    EXPECT_EQ(numbers, expected);
    for (; at < kRows; ++at) {
      EXPECT_EQ(row_index[at], kRows);
      for (int k = 0; k < kTopk; ++k) EXPECT_EQ(ids[at * kTopk + k], -1);
    }
  });
}

TEST_P(LocalKernelsTest, TakeTheWeightsThatAnswerTheNumbersOfChoices) {
  const uint64_t seed = test_seed();
  std::vector<float> numbers(kTokens * kTopk), weights;
  for (int i = 0; i < kTokens * kTopk; ++i) numbers[i] = static_cast<float>(i % kTopk);
  for (int r = 0; r < kRanks; ++r) {
    const Choices choices = draw(seed, r);
    weights.insert(weights.end(), choices.weight.begin(), choices.weight.end());
  }
  with_dispatch(seed, &numbers, [&](ExpertParallel& ep, DispatchHandle& handle) {
    ep.set_term_weights(handle, weights.data(), kPlace);
    alignas(16) std::vector<float> sums(kRows * kHidden, std::numeric_limits<float>::quiet_NaN());
    ep.simulated_experts(handle, {.factor = 1}, sums.data(), kPlace);
    for (int row = 0; row < kRows; ++row) {
      float total = 0;
      const auto choices = choices_of_row(seed, ep.config().rank, row);
      for (const auto& [expert, weight] : choices) total += weight;
      if (num_here(choices) > 0) {
        EXPECT_EQ(sums[row * kHidden], total * value_of(row)) << "row " << row;
      }
    }
  });
}

TEST_P(LocalKernelsTest, CopyLandedRowsToTheirPlaces) {
  const uint64_t seed = test_seed();
  with_dispatch(seed, nullptr, [&](ExpertParallel& ep, DispatchHandle& handle) {
    std::vector<float> rows(kRows * kHidden, -1);
    ep.gather_rows(handle, rows.data(), nullptr, false, kPlace);
    for (int row = 0; row < kRows; ++row) {
      const float expected = num_here(choices_of_row(seed, ep.config().rank, row)) > 0 ? value_of(row) : -1;
      for (int c = 0; c < kHidden; ++c) EXPECT_EQ(rows[row * kHidden + c], expected) << "row " << row;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(ChoicesTravel, LocalKernelsTest, ::testing::Values(0, kTokens));

TEST(TopkLayoutTest, CountsChoicesAndTokens) {
  const Choices choices = draw(test_seed(), 0);
  std::vector<int32_t> counts(kRanks + kExperts, -5), expected(kRanks + kExperts, 0);
  bool in_rank[kTokens * kRanks], expected_in_rank[kTokens * kRanks] = {};
  run_topk_layout("cpu", 0,
                  {.topk_idx = {choices.expert.data(), false},
                   .num_tokens = kTokens,
                   .num_topk = kTopk,
                   .num_experts = kExperts,
                   .num_ranks = kRanks,
                   .counts = counts.data(),
                   .is_token_in_rank = in_rank},
                  nullptr);
  for (int i = 0; i < kTokens * kTopk; ++i) {
    const int expert = choices.expert[i];
    if (expert < 0) continue;
    ++expected[kRanks + expert];
    bool& is_in_rank = expected_in_rank[i / kTopk * kRanks + expert / kLocalExperts];
    if (!std::exchange(is_in_rank, true)) ++expected[expert / kLocalExperts];
  }
  EXPECT_EQ(counts, expected);
  for (int i = 0; i < kTokens * kRanks; ++i) EXPECT_EQ(in_rank[i], expected_in_rank[i]) << "token " << i / kRanks;
}

}  // namespace
}  // namespace moe_a2a::small_case
