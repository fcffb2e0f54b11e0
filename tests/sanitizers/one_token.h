// One token per rank, to an expert of the next rank and back.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "moe/expert_parallel.h"
#include "rows_of.h"

namespace moe_a2a {

inline constexpr int kRowLength = 8;

inline MoeConfig one_token_config(int num_ranks, int num_max_ll_tokens) {
  return {.num_ranks = num_ranks,
          .num_experts = num_ranks,
          .num_topk = 1,
          .hidden = kRowLength,
          .num_max_tokens_per_rank = 2,
          .dtype = DType::kFloat32,
          .num_max_ll_tokens = num_max_ll_tokens};
}

inline std::shared_ptr<DispatchHandle> dispatch_one(ExpertParallel& ep, float value, const LaunchPlace& place) {
  const std::vector<float> x(kRowLength, value);
  const int32_t expert = (ep.config().rank + 1) % ep.config().num_ranks;
  return ep.dispatch({.num_tokens = 1, .topk_idx = {&expert, false}, .x = rows_of(x, kRowLength)}, Layout::kRows, 1,
                     place);
}

inline void combine_one(ExpertParallel& ep, DispatchHandle& handle, float value, const LaunchPlace& place) {
  const std::vector<float> y(ep.config().route_capacity() * kRowLength, value);
  std::vector<float> combined(kRowLength);
  ep.combine(handle, {.y = rows_of(y, kRowLength), .num_y_rows = ep.config().route_capacity()}, combined.data(), place);
  ep.raise_reported();
  EXPECT_EQ(combined[kRowLength - 1], value);
}

}  // namespace moe_a2a
