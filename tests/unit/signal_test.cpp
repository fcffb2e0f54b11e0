// What travels as one word: signals, route entries, sets of ranks.
#include "comm/signal.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "comm/rank_set.h"
#include "moe/context.h"
#include "seed.h"

namespace moe_a2a {
namespace {

constexpr uint64_t kEpochs = uint64_t{1} << 44;

TEST(Signal, KeepsEpochAndPayloadApart) {
  for (const uint64_t epoch : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 32, kEpochs - 1}) {
    for (const uint32_t payload : {0u, 1u, Signal::kPayloadMask}) {
      const uint64_t word = Signal::pack(epoch, payload);
      EXPECT_EQ(Signal::epoch_of(word), epoch);
      EXPECT_EQ(Signal::payload_of(word), payload);
    }
  }
  EXPECT_EQ(Signal::epoch_of(Signal::pack(kEpochs, 0)), 0u);  // wraps
}

TEST(Signal, ReachesAcrossTheWrap) {
  for (const uint64_t epoch : {uint64_t{1}, (uint64_t{1} << 32) - 1, uint64_t{1} << 32, kEpochs / 2 - 1, kEpochs / 2,
                               kEpochs - 2, kEpochs - 1, kEpochs, kEpochs + 1}) {
    for (const uint32_t payload : {0u, 5u, Signal::kPayloadMask}) {
      for (uint64_t later = 0; later < 4; ++later) {
        EXPECT_TRUE(Signal::reached(Signal::pack(epoch + later, payload), epoch)) << epoch << " + " << later;
        EXPECT_FALSE(Signal::reached(Signal::pack(epoch, payload), epoch + later + 1)) << epoch << " - " << later;
      }
      EXPECT_TRUE(Signal::reached(Signal::pack(epoch + kEpochs / 2 - 1, payload), epoch));
    }
  }
}

TEST(RouteEntry, KeepsItsPartsApart) {
  for (const uint32_t expert : {0u, 1u, 255u, static_cast<uint32_t>(kMaxExperts - 1)}) {
    for (const uint32_t idx : {0u, 1u, static_cast<uint32_t>(kMaxChunk * kMaxTopk - 1)}) {
      const RouteEntry entry = RouteEntry::pack(expert, idx);
      EXPECT_FALSE(entry.is_dropped());
      EXPECT_EQ(entry.expert(), static_cast<int>(expert));
      EXPECT_EQ(entry.idx_in_chunk(), static_cast<int>(idx));
    }
  }
  EXPECT_TRUE(RouteEntry::dropped().is_dropped());
  EXPECT_TRUE(RouteEntry{}.is_dropped());
}

TEST(RankSet, IsVisitedInTheRoundFromAnyRank) {
  std::mt19937_64 random(test_seed());
  for (int round = 0; round < 1000; ++round) {
    const RankSet set{random() & (round % 2 ? random() : ~uint64_t{0})};
    const int start = round % 64;
    std::vector<int> expected, seen;
    for (int i = 0; i < 64; ++i) {
      if (set.contains((start + i) % 64)) expected.push_back((start + i) % 64);
    }
    set.visit_from(start, [&](int rank) { seen.push_back(rank); });
    EXPECT_EQ(seen, expected);
  }
}

TEST(RankSet, IsASet) {
  RankSet set;
  EXPECT_TRUE(set.empty());
  std::vector<int> expected = {0, 3, 31, 32, 63};
  for (const int rank : {63, 3, 0, 32, 3, 31}) set.insert(rank);
  for (int rank = 0; rank < 64; ++rank)
    EXPECT_EQ(set.contains(rank), std::count(expected.begin(), expected.end(), rank));
  std::vector<int> seen;
  for (; !set.empty(); set.remove_first()) seen.push_back(set.first());
  EXPECT_EQ(seen, expected);
}

TEST(RankSet, AllAndOnly) {
  for (int n = 1; n <= kMaxRanks; ++n) {
    int count = 0;
    for (RankSet rest = RankSet::all(n); !rest.empty(); rest.remove_first()) EXPECT_EQ(rest.first(), count++);
    EXPECT_EQ(count, n);
    RankSet one = RankSet::only(n - 1);
    EXPECT_EQ(one.first(), n - 1);
    one.remove_first();
    EXPECT_TRUE(one.empty());
  }
}

}  // namespace
}  // namespace moe_a2a
