// Which sizes an ExpertParallel and a Communicator take, and what follows from them.
#include "moe/moe_config.h"

#include <gtest/gtest.h>

#include <string>

#include "comm/communicator.h"

namespace moe_a2a {
namespace {

MoeConfig small_config() {
  return {.rank = 1,
          .num_ranks = 4,
          .num_experts = 8,
          .num_topk = 3,
          .hidden = 20,
          .num_max_tokens_per_rank = 5,
          .num_buffers = 2,
          .dtype = DType::kBfloat16};
}

TEST(Communicator, NamesAWrongRankAndWhatItsLimitIs) {
  EXPECT_EQ(Communicator::violation(3, 4), "");
  EXPECT_EQ(Communicator::violation(0, 0), "num_ranks=0 < 1; pass num_ranks=1 or more");
  EXPECT_EQ(Communicator::violation(0, 65), "num_ranks=65 > 64; pass a group of at most 64 ranks");
  EXPECT_EQ(Communicator::violation(4, 4), "rank=4 is not in [0, 4)");
  EXPECT_EQ(Communicator::violation(-1, 4), "rank=-1 is not in [0, 4)");
}

TEST(MoeConfig, HoldsWithOrdinaryNumbers) { EXPECT_EQ(small_config().violation(), ""); }

struct Rule {
  const char* name;
  void (*violate)(MoeConfig&);
  const char* text;
};

class MoeConfigRule : public ::testing::TestWithParam<Rule> {};
TEST_P(MoeConfigRule, NamesValueLimitAndArgument) {
  MoeConfig config = small_config();
  GetParam().violate(config);
  EXPECT_EQ(config.violation(), GetParam().text);
}

INSTANTIATE_TEST_SUITE_P(
    Each, MoeConfigRule,
    ::testing::Values(
        Rule{"experts", [](MoeConfig& c) { c.num_experts = 0; }, "num_experts=0 < 1; pass num_experts=1 or more"},
        Rule{"divisible", [](MoeConfig& c) { c.num_experts = 10; },
             "num_experts=10 is not divisible by num_ranks=4; pass num_experts=12 and leave the added experts unused"},
        Rule{"topk", [](MoeConfig& c) { c.num_topk = -2; }, "num_topk=-2 < 1; pass num_topk=1 or more"},
        Rule{"many_experts", [](MoeConfig& c) { c.num_experts = 65536; },
             "num_experts=65536 > 65535; pass num_experts=65535 or less"},
        Rule{"many_choices", [](MoeConfig& c) { c.num_topk = 65; }, "num_topk=65 > 64; pass num_topk=64 or less"},
        Rule{"hidden", [](MoeConfig& c) { c.hidden = 0; }, "hidden=0 < 1; pass hidden=1 or more"},
        Rule{"tokens", [](MoeConfig& c) { c.num_max_tokens_per_rank = 0; },
             "num_max_tokens_per_rank=0 < 1; pass num_max_tokens_per_rank=1 or more"},
        Rule{"many_tokens", [](MoeConfig& c) { c.num_max_tokens_per_rank = 1 << 19; },
             "num_max_tokens_per_rank=524288 > 131072; pass num_max_tokens_per_rank=131072 or less"},
        Rule{"ll_tokens", [](MoeConfig& c) { c.num_max_ll_tokens = -1; }, "num_max_ll_tokens=-1 < 0; pass 0 or more"},
        Rule{"many_ll_tokens", [](MoeConfig& c) { c.num_max_ll_tokens = 6; },
             "num_max_ll_tokens=6 > 5, the most that receivers can count; pass num_max_ll_tokens=5, or less"},
        Rule{"many_ll_choices",
             [](MoeConfig& c) { c.num_max_tokens_per_rank = 5000, c.num_topk = 20, c.num_max_ll_tokens = 52; },
             "num_max_ll_tokens=52 > 51, the most that receivers can count; pass num_max_ll_tokens=51, or less"},
        Rule{"ll_with_many_experts", [](MoeConfig& c) { c.num_experts = 2052, c.num_max_ll_tokens = 1; },
             "num_max_ll_tokens=1 > 0, the most that receivers can count; pass num_max_ll_tokens=0, or less"},
        Rule{"buffers", [](MoeConfig& c) { c.num_buffers = 0; }, "num_buffers=0 < 1; pass num_buffers=1 or more"}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(MoeConfig, RowsStartOnLinesAndHoldTheirScales) {
  MoeConfig config = small_config();
  for (int hidden = 1; hidden < 300; ++hidden) {
    config.hidden = hidden;
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBfloat16, DType::kFloat8}) {
      EXPECT_EQ(config.row_stride(dtype) % 128, 0);
      EXPECT_GE(config.row_stride(dtype), config.row_bytes(dtype));
      EXPECT_LT(config.row_stride(dtype), config.row_bytes(dtype) + 128);
    }
    EXPECT_GE(config.scales_offset(), hidden);
    EXPECT_EQ(config.scales_offset() % 16, 0);
    EXPECT_EQ(config.row_bytes(DType::kFloat8), config.scales_offset() + 4 * ((hidden + 127) / 128));
    EXPECT_GE(config.max_row_stride(), config.row_stride(DType::kFloat8));
  }
}

TEST(MoeConfig, PiecesAreWholeScaleBlocksAndCoverTheRow) {
  MoeConfig config = small_config();
  EXPECT_EQ(RowLayout::piece_length() % kScaleBlock, 0);
  for (int hidden = 1; hidden < 3000; ++hidden) {
    config.hidden = hidden;
    ASSERT_GE(config.num_pieces() * RowLayout::piece_length(), hidden);
    ASSERT_LT((config.num_pieces() - 1) * RowLayout::piece_length(), hidden);  // the last piece is not empty
  }
  config.hidden = 7168;
  EXPECT_EQ(config.num_pieces(), 14);
}

TEST(MoeConfig, CapacityForLlTokensIsThatOfTheShortestLimit) {
  MoeConfig config = small_config();
  EXPECT_EQ(config.ll_token_capacity(), 5);  // per rank
  config.num_max_tokens_per_rank = 1000;
  EXPECT_EQ(config.ll_token_capacity(), 256);
  config.num_topk = 8;
  EXPECT_EQ(config.ll_token_capacity(), 128);  // 4096 choices over 4 ranks
  config.num_ranks = 64, config.num_topk = 64;
  EXPECT_EQ(config.ll_token_capacity(), 1);
  config.num_experts = 2048;
  EXPECT_EQ(config.ll_token_capacity(), 1);
  config.num_experts = 2112;
  EXPECT_EQ(config.ll_token_capacity(), 0);
}

TEST(MoeConfig, SendsABatchAsLlWordsUpToTheLimit) {
  MoeConfig config = small_config();
  EXPECT_FALSE(config.sends_ll_choices(0));  // with LL words disabled, even an empty batch is large
  config.num_max_ll_tokens = 3;
  EXPECT_TRUE(config.sends_ll_choices(0));
  EXPECT_TRUE(config.sends_ll_choices(3));
  EXPECT_FALSE(config.sends_ll_choices(4));
}

TEST(MoeConfig, SendsRowsAsLlWordsUpToTheirBytesToAllOtherRanks) {
  const MoeConfig config{
      .num_ranks = 4, .num_topk = 1, .hidden = 7168, .dtype = DType::kBfloat16, .num_max_ll_tokens = 100};
  const auto bytes = [&](int num_tokens, DType dtype) { return num_tokens * 3 * config.row_bytes(dtype); };
  for (int n = 1; n <= 101; ++n) {
    const bool is_small = n <= 100;
    EXPECT_EQ(config.sends_ll_rows(n, DType::kBfloat16), is_small && bytes(n, DType::kBfloat16) <= 1 << 20);
    EXPECT_EQ(config.sends_ll_rows(n, DType::kFloat8), is_small && bytes(n, DType::kFloat8) <= 3 << 19);
    EXPECT_EQ(config.returns_ll(n), is_small && bytes(n, DType::kBfloat16) <= 3 << 20);
  }
  const MoeConfig alone{.num_ranks = 1, .hidden = 7168, .num_max_ll_tokens = 5};
  EXPECT_TRUE(alone.sends_ll_rows(5, DType::kFloat32) && !alone.sends_ll_rows(6, DType::kFloat32));
}

}  // namespace
}  // namespace moe_a2a
