// The expert lists against a model that sorts, for random tables, layouts and grids.

#include "kernels/expert_lists.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "kernels/route.h"
#include "seed.h"

namespace moe_a2a {
namespace {

TEST(TokenLine, FindsEveryTokenFromEveryStart) {
  const std::vector<std::vector<int32_t>> lines = {{3}, {0, 3}, {2, 0, 3}, {0, 0, 1, 0, 2}, {1, 0, 0, 0, 1}, {4, 4}};
  for (const auto& num_tokens : lines) {
    std::vector<std::pair<int, int>> expected;
    for (int r = 0; r < static_cast<int>(num_tokens.size()); ++r) {
      for (int t = 0; t < num_tokens[r]; ++t) expected.push_back({r, t});
    }
    for (size_t start = 0; start < expected.size(); ++start) {
      for (size_t step = 1; step <= expected.size(); ++step) {
        TokenLine at(num_tokens.data(), static_cast<int64_t>(start));
        for (size_t unit = start; unit < expected.size(); unit += step) {
          EXPECT_EQ(std::pair(at.rank, at.token), expected[unit]);
          if (unit + step < expected.size()) at.skip(static_cast<int64_t>(step));
        }
      }
    }
  }
}

TEST(Destinations, AreTheDistinctRanksOfATokensExperts) {
  const MoeConfig config{.num_ranks = 4, .num_experts = 12, .num_topk = 5};
  const int32_t choices[] = {11, -1, 0, 2, 9};
  const RankSet ranks = destinations(config, choices);
  EXPECT_EQ(ranks.bits, 0b1001u);
  EXPECT_EQ(local_expert(config, 11, 3), 2);
  EXPECT_EQ(local_expert(config, 11, 2), -1);
  EXPECT_EQ(local_expert(config, -1, 0), -1);
  const int32_t dropped[] = {-1, -1, -1, -1, -1};
  EXPECT_TRUE(destinations(config, dropped).empty());
}

// A rank that has received all tables.
struct Receiver {
  DispatchRecvArgs args;
  std::vector<std::max_align_t> symmetric, local;
  std::vector<int32_t> num_tokens;
  Report report;
  Tally tally;

  Receiver(std::mt19937& random, Layout layout) {
    const auto pick = [&](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
    MoeConfig& config = args.context.config;
    config = {.num_ranks = pick(1, 5),
              .num_topk = pick(1, 9),
              .hidden = 1,
              .num_max_tokens_per_rank = pick(1, 40),
              .num_buffers = 2};
    config.num_experts = config.num_ranks * pick(1, 8);
    config.rank = pick(0, config.num_ranks - 1);
    args.buffer = pick(0, 1);
    args.layout = layout;
    args.expert_alignment = layout == Layout::kExpertMajor ? pick(1, 16) : 1;
    args.context.wait.report = &report;
    args.context.wait.tally = &tally;
    WorkspaceSize size;
    make_workspace(config, nullptr, nullptr, &size);
    symmetric.resize(size.symmetric_bytes / sizeof(std::max_align_t) + 1);
    local.resize(size.local_bytes / sizeof(std::max_align_t) + 1);
    args.context.ws = make_workspace(config, reinterpret_cast<std::byte*>(symmetric.data()),
                                     reinterpret_cast<std::byte*>(local.data()), &size);
    const int kind = pick(0, 3);  // of routing: anything, all to one expert, all dropped, all here
    for (int r = 0; r < config.num_ranks; ++r) {
      num_tokens.push_back(pick(0, 3) == 0 ? 0 : pick(0, config.num_max_tokens_per_rank));
      for (int t = 0; t < config.num_max_tokens_per_rank; ++t) {
        for (int k = 0; k < config.num_topk; ++k) {
          const int mine = config.rank * config.num_local_experts();
          args.context.ws.table_idx(args.buffer, r, t, k) = kind == 1   ? mine
                                                            : kind == 2 ? -1
                                                            : kind == 3 ? mine + pick(0, config.num_local_experts() - 1)
                                                                        : pick(-1, config.num_experts - 1);
          args.context.ws.table_weight(args.buffer, r, t, k) = static_cast<float>(pick(0, 1000));
        }
      }
    }
  }

  void build(int num_blocks) {
    std::vector<std::max_align_t> shared(ExpertLists::shared_bytes(args.context.config) / sizeof(std::max_align_t) + 1);
    for (int b = 0; b < num_blocks; ++b) {
      Block::Scratch scratch;
      const Grid grid{b, num_blocks};
      const Block block(scratch);
      ExpertLists lists(args, grid, block, reinterpret_cast<std::byte*>(shared.data()));
      std::copy(num_tokens.begin(), num_tokens.end(), lists.num_tokens());
      lists.build();
    }
  }

  void check() const {
    const MoeConfig& config = args.context.config;
    const Workspace& ws = args.context.ws;
    const int b = args.buffer, room = config.num_ranks * config.num_max_tokens_per_rank;
    uint32_t num_lost = 0;
    int32_t position = 0;
    for (int e = 0; e < config.num_local_experts(); ++e) {
      if (args.layout == Layout::kMasked) position = e * room;
      ASSERT_EQ(ws.expert_offsets(b, e), position);
      int count = 0;
      for (int r = 0; r < config.num_ranks; ++r) {
        for (int t = 0; t < num_tokens[r]; ++t) {
          for (int k = 0; k < config.num_topk; ++k) {
            if (ws.table_idx(b, r, t, k) != config.rank * config.num_local_experts() + e) continue;
            const int32_t row = r * config.num_max_tokens_per_rank + t;
            if (args.layout == Layout::kMasked && count == room) {
              ++num_lost;
              ASSERT_EQ(ws.row_route(b, row, k), -1);
              continue;
            }
            ASSERT_EQ(ws.expert_row_index(b, position), row);
            ASSERT_EQ(ws.route_src_rank(b, position), r);
            ASSERT_EQ(ws.route_src_token(b, position), t);
            ASSERT_EQ(ws.route_weight(b, position), ws.table_weight(b, r, t, k));
            ASSERT_EQ(ws.row_route(b, row, k), position);
            ++count, ++position;
          }
        }
      }
      ASSERT_EQ(ws.expert_counts(b, e), count);
      for (; args.layout == Layout::kExpertMajor && position % args.expert_alignment != 0; ++position) {
        ASSERT_EQ(ws.expert_row_index(b, position), -1);
        ASSERT_EQ(ws.route_src_rank(b, position), -1);
        ASSERT_EQ(ws.route_weight(b, position), 0.0f);
      }
    }
    if (args.layout != Layout::kMasked) {
      ASSERT_EQ(ws.expert_offsets(b, config.num_local_experts()), position);
    }
    ASSERT_EQ(report.num_lost_routes, num_lost);
    check_landed();
  }

  void check_landed() const {
    const MoeConfig& config = args.context.config;
    const Workspace& ws = args.context.ws;
    int32_t landed = 0;
    for (int r = 0; r < config.num_ranks; ++r) {
      ASSERT_EQ(ws.num_recv_tokens(args.buffer, r), num_tokens[r]);
      for (int t = 0; t < num_tokens[r]; ++t) {
        if (!destinations(config, ws.table_idx.at(args.buffer, r, t)).contains(config.rank)) continue;
        ASSERT_EQ(ws.landed_row(args.buffer, landed++), r * config.num_max_tokens_per_rank + t);
      }
    }
    ASSERT_EQ(ws.num_landed_rows(args.buffer, 0), landed);
  }
};

class ExpertListsTest : public ::testing::TestWithParam<Layout> {};

TEST_P(ExpertListsTest, EqualTheModel) {
  const uint64_t seed = test_seed();
  std::mt19937 random(static_cast<unsigned>(seed));
  for (int round = 0; round < 400 && !HasFatalFailure(); ++round) {
    Receiver receiver(random, GetParam());
    const int num_blocks = 1 + round % 7;
    SCOPED_TRACE("round " + std::to_string(round));
    receiver.build(num_blocks);
    receiver.check();
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, ExpertListsTest,
                         ::testing::Values(Layout::kRows, Layout::kExpertMajor, Layout::kMasked));

}  // namespace
}  // namespace moe_a2a
