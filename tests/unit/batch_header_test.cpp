// Headers of every bound: each is read back by the ranks that have the same bound, and by no other.
#include "moe/batch_header.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

namespace moe_a2a {
namespace {

constexpr RowFormat kFormats[] = {RowFormat::kPlain, RowFormat::kFloat8, RowFormat::kMxFloat8};

// The bounds that a dispatch of such an object may have.
std::vector<MoeConfig> configs_of(int num_max_tokens) {
  const MoeConfig whole = {.num_max_tokens_per_rank = num_max_tokens};
  std::vector<MoeConfig> configs = {whole};
  for (int bound = 1; bound < num_max_tokens; bound *= 2) configs.push_back(whole.with_bound(bound));
  return configs;
}

class BatchHeaderTest : public ::testing::TestWithParam<int> {};

TEST_P(BatchHeaderTest, OnlyTheSameBoundReadsIt) {
  const std::vector<MoeConfig> configs = configs_of(GetParam());
  for (const MoeConfig& sender : configs) {
    const int most = sender.num_max_tokens_per_rank;
    for (const int n : std::set<int>{0, 1, most / 2, most - 1, most}) {
      for (const RowFormat format : kFormats) {
        const uint32_t header = BatchHeader::pack(sender, n, format);
        ASSERT_LT(header, BatchHeader::kRefused);
        ASSERT_EQ(BatchHeader::format(header), format);
        ASSERT_EQ(BatchHeader::num_tokens(sender, header), n);
        for (const MoeConfig& reader : configs) {
          ASSERT_EQ(BatchHeader::has_bound_of(reader, header), reader.num_max_tokens_per_rank == most)
              << n << " of " << most << " read by " << reader.num_max_tokens_per_rank;
        }
        const auto kind = BatchHeader::Kind::unpacked(BatchHeader::Kind::of(header).packed());
        ASSERT_EQ(std::min(1 << kind.exponent, GetParam()), most);
        ASSERT_EQ(kind.format, format);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, BatchHeaderTest, ::testing::Values(1, 2, 3, 5, 64, 100, 4097, kMaxTokensPerRank));

// A wait that gave up has read no header.
TEST(BatchHeader, ZeroIsNone) {
  for (const MoeConfig& config : configs_of(100)) EXPECT_FALSE(BatchHeader::has_bound_of(config, 0));
}

}  // namespace
}  // namespace moe_a2a
