// What ranks compare before they merge each other's values.
#include "collectives/announcement.h"

#include <gtest/gtest.h>

#include <set>

namespace moe_a2a {
namespace {

TEST(Announcement, WordsDifferInEverythingThatTheirCallsCanDifferIn) {
  std::set<uint32_t> seen;
  size_t num_calls = 0;
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBfloat16}) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin, ReduceOp::kAvg}) {
      for (const int64_t count : {int64_t{0}, int64_t{1}, int64_t{255}, kMaxWordsBytes / 4, kMaxWordsBytes / 2}) {
        Announcement::Terms terms{CollectiveKind::kAllReduce, dtype, op, Algorithm::kOneShot};
        EXPECT_EQ(Announcement::of(terms, count).terms_of_words(), 0u) << "of rows";
        terms.wire = CollectiveWire::kWords;
        seen.insert(Announcement::of(terms, count).terms_of_words());
        ++num_calls;
      }
    }
  }
  EXPECT_EQ(seen.size(), num_calls);
  EXPECT_FALSE(seen.contains(0));
  EXPECT_EQ(Announcement::of_refusal().terms_of_words(), 0u);
}

TEST(Announcement, SaysWhetherValuesAreLlWords) {
  Announcement::Terms terms{CollectiveKind::kAllReduce, DType::kFloat16, ReduceOp::kMax, Algorithm::kOneShot};
  EXPECT_EQ(describe(Announcement::of(terms, 5)), "all_reduce of 5 float16, max, one_shot");
  terms.wire = CollectiveWire::kWords;
  EXPECT_EQ(describe(Announcement::of(terms, 5)), "all_reduce of 5 float16, max, one_shot in LL words");
}

}  // namespace
}  // namespace moe_a2a
