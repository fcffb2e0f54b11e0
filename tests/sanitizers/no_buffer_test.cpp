// A rank whose buffers are all open refuses its peers' dispatches. They learn of it, whether the host sees a launch's
// report at once or, as on a GPU, later; afterwards all ranks are in step.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "rows_of.h"
#include "thread_ranks.h"

namespace moe_a2a {
namespace {

constexpr int kRowLength = 8, kRefuser = 1;
constexpr const char* kWhy = "no buffer is free";

MoeConfig no_buffer_config(int num_max_ll_tokens) {
  return {.num_ranks = 3,
          .num_experts = 3,
          .num_topk = 1,
          .hidden = kRowLength,
          .num_max_tokens_per_rank = 2,
          .dtype = DType::kFloat32,
          .num_max_ll_tokens = num_max_ll_tokens};
}

// One token to the next rank.
std::shared_ptr<DispatchHandle> dispatch(ExpertParallel& ep, float value, const LaunchPlace& place) {
  const std::vector<float> x(kRowLength, value);
  const int32_t expert = (ep.config().rank + 1) % ep.config().num_ranks;
  return ep.dispatch({.num_tokens = 1, .topk_idx = {&expert, false}, .x = rows_of(x, kRowLength)}, Layout::kRows, 1,
                     place);
}

void combine(ExpertParallel& ep, DispatchHandle& handle, float value, const LaunchPlace& place) {
  const std::vector<float> y(ep.config().route_capacity() * kRowLength, value);
  std::vector<float> combined(kRowLength);
  ep.combine(handle, {.y = rows_of(y, kRowLength), .num_y_rows = ep.config().route_capacity()}, combined.data(), place);
  ep.raise_reported();
  EXPECT_EQ(combined[kRowLength - 1], value);
}

class NoBuffer : public ::testing::TestWithParam<int> {};

TEST_P(NoBuffer, PeersAreToldAndAllStayInStep) {
  run_ranks(no_buffer_config(GetParam()), 60.0, [&](ExpertParallel& ep) {
    const LaunchPlace place{.num_blocks = 3};
    for (int round = 0; round < 6; ++round) {
      const std::vector handles = {dispatch(ep, 1, place), dispatch(ep, 2, place)};
      const int first = round % 2;
      if (ep.config().rank != kRefuser) ep.release(*handles[first], place);
      for (int attempt = 0; attempt < 1 + round / 2; ++attempt) {
        try {
          if (ep.config().rank == kRefuser) {
            EXPECT_THROW(dispatch(ep, 3, place), std::runtime_error);
            ep.refuse_dispatch(kWhy, place);
          } else {
            dispatch(ep, 3, place);
            ep.raise_reported();
            ADD_FAILURE() << "rank " << ep.config().rank << " was not told";
          }
        } catch (const PeerRefused& refused) {
          EXPECT_EQ(refused.peer, kRefuser);
          EXPECT_NE(std::string(refused.what()).find(kWhy), std::string::npos) << refused.what();
        }
      }
      for (const auto& handle : handles) ep.release(*handle, place);
      combine(ep, *dispatch(ep, 4, place), 5, place);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(NumMaxLlTokens, NoBuffer, ::testing::Values(0, 2));

}  // namespace
}  // namespace moe_a2a
