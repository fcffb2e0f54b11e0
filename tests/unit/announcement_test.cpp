// What ranks compare before they merge each other's values.
#include "collectives/announcement.h"

#include <gtest/gtest.h>

#include <iterator>
#include <set>
#include <vector>

namespace moe_a2a {
namespace {

TEST(Announcement, DiffersInEverythingThatCallsCanDifferIn) {
  const Announcement::Terms terms{CollectiveKind::kAllReduce, DType::kFloat16, ReduceOp::kMax, Algorithm::kTwoShot};
  const auto with = [&](auto Announcement::Terms::* term, auto value) {
    Announcement::Terms changed = terms;
    changed.*term = value;
    return Announcement::of(changed, 5, 7);
  };
  const Announcement all[] = {Announcement::of(terms, 5, 7),
                              with(&Announcement::Terms::kind, CollectiveKind::kReduceScatter),
                              with(&Announcement::Terms::dtype, DType::kBfloat16),
                              with(&Announcement::Terms::op, ReduceOp::kAvg),
                              with(&Announcement::Terms::algorithm, Algorithm::kDirect),
                              with(&Announcement::Terms::codec, LineCodec::kQ4),
                              with(&Announcement::Terms::wire, CollectiveWire::kWords),
                              Announcement::of(terms, 6, 7),
                              Announcement::of(terms, 5 + (int64_t{1} << 32), 7),
                              Announcement::of(terms, 5 + (int64_t{1} << 39), 7),
                              Announcement::of(terms, 5, 8),
                              Announcement::of(terms, 5, 7 + (uint64_t{1} << 63)),
                              Announcement::of_refusal()};
  std::set<std::vector<uint32_t>> seen;
  for (const Announcement& one : all) seen.insert({std::begin(one.word), std::end(one.word)});
  EXPECT_EQ(seen.size(), std::size(all));
  EXPECT_EQ(describe(all[9]), "all_reduce of 549755813893 float16, max, two_shot");
  EXPECT_TRUE(Announcement::of_refusal().is_refusal() && !all[0].is_refusal());
  EXPECT_TRUE(all[4].is_direct() && !all[0].is_direct());
}

TEST(Announcement, SaysWhetherValuesAreLlWords) {
  Announcement::Terms terms{CollectiveKind::kAllReduce, DType::kFloat16, ReduceOp::kMax, Algorithm::kOneShot};
  EXPECT_EQ(describe(Announcement::of(terms, 5)), "all_reduce of 5 float16, max, one_shot");
  terms.wire = CollectiveWire::kWords;
  EXPECT_EQ(describe(Announcement::of(terms, 5)), "all_reduce of 5 float16, max, one_shot in LL words");
}

}  // namespace
}  // namespace moe_a2a
