// A rank whose buffers are all open refuses its peers' dispatches. They learn of it, whether the host sees a launch's
// report at once or, as on a GPU, later; afterwards all ranks are in step.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "one_token.h"
#include "thread_ranks.h"

namespace moe_a2a {
namespace {

constexpr int kRefuser = 1;
constexpr const char* kWhy = "no buffer is free";

class NoBuffer : public ::testing::TestWithParam<int> {};

TEST_P(NoBuffer, PeersAreToldAndAllStayInStep) {
  run_ranks(one_token_config(3, GetParam()), 60.0, [&](ExpertParallel& ep) {
    const LaunchPlace place{.num_blocks = 3};
    for (int round = 0; round < 6; ++round) {
      const std::vector handles = {dispatch_one(ep, 1, place), dispatch_one(ep, 2, place)};
      const int first = round % 2;
      if (ep.config().rank != kRefuser) ep.release(*handles[first], place);
      for (int attempt = 0; attempt < 1 + round / 2; ++attempt) {
        try {
          if (ep.config().rank == kRefuser) {
            EXPECT_THROW(dispatch_one(ep, 3, place), std::runtime_error);
            ep.refuse_dispatch(kWhy, place);
          } else {
            dispatch_one(ep, 3, place);
            ep.raise_reported();
            ADD_FAILURE() << "rank " << ep.config().rank << " was not told";
          }
        } catch (const PeerRefused& refused) {
          EXPECT_EQ(refused.peer, kRefuser);
          EXPECT_NE(std::string(refused.what()).find(kWhy), std::string::npos) << refused.what();
        }
      }
      for (const auto& handle : handles) ep.release(*handle, place);
      combine_one(ep, *dispatch_one(ep, 4, place), 5, place);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(NumMaxLlTokens, NoBuffer, ::testing::Values(0, 2));

}  // namespace
}  // namespace moe_a2a
