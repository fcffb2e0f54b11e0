// How the work of sending is shared out: units, the order of the rows of a combine.

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "comm/units.h"
#include "moe/combine/combine_send.h"
#include "seed.h"
#include "unit/heaps.h"

namespace moe_a2a {
namespace {

MoeConfig config_of(int num_ranks, int num_tokens) {
  return {.num_ranks = num_ranks,
          .num_experts = num_ranks,
          .num_topk = 1,
          .hidden = 2,
          .num_max_tokens_per_rank = num_tokens};
}

TEST(Units, AreEachTakenOnce) {
  for (int num_blocks = 1; num_blocks < 6; ++num_blocks) {
    for (int num_units = 0; num_units < 20; ++num_units) {
      std::vector<int> taken(num_units);
      uint32_t ticket = 0;
      for (int b = 0; b < num_blocks; ++b) {
        Block::Scratch scratch;
        const Block block(scratch);
        for (Units units(Grid{b, num_blocks}, block, 1, &ticket); units.current() < num_units; units.advance()) {
          ++taken[units.current()];
        }
      }
      EXPECT_EQ(taken, std::vector<int>(num_units, 1));
      EXPECT_EQ(ticket, 0u);  // the blocks of the CPU take turns
    }
  }
}

// ---- the rows of a combine

TEST(LandedLine, VisitsAllRowsOwnersInTurnEachInItsOrder) {
  std::mt19937 random(static_cast<unsigned>(test_seed()));
  const auto pick = [&](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
  for (int round = 0; round < 500; ++round) {
    const int num_ranks = pick(1, 9);
    Heaps heaps(config_of(num_ranks, 20));
    const int me = pick(0, num_ranks - 1);
    const Context& c = heaps.context[me];
    int32_t* offsets = c.ws.landed_offsets.at(0);
    std::vector<int> owner_of;
    for (int r = 0; r < num_ranks; ++r) {
      offsets[r + 1] = offsets[r] + (pick(0, 2) == 0 ? 0 : pick(0, 20));
      owner_of.resize(offsets[r + 1], r);
    }
    std::vector<int> num_sent(num_ranks), left(num_ranks);
    for (int r = 0; r < num_ranks; ++r) left[r] = offsets[r + 1] - offsets[r];
    const CombineSendArgs args{.context = c, .presummed = true};
    const bool keeps_own = pick(0, 1) == 1;
    const OwnSums own(keeps_own ? &args : nullptr);
    const LandedLine line(c, 0, own);
    if (keeps_own) left[me] = 0;
    ASSERT_EQ(line.size(), std::accumulate(left.begin(), left.end(), 0));
    std::vector<int> behind_own;
    int before = me;
    for (int i = 0; i < line.size(); ++i) {
      behind_own.push_back(line.behind_own(i));
      const int landed = line.in_turn(i);
      ASSERT_GE(landed, 0);
      ASSERT_LT(landed, offsets[num_ranks]);
      // The next owner behind the one before that has rows left, and of these the first: so all come once.
      int expected = (before + 1) % num_ranks;
      while (left[expected] == 0) expected = (expected + 1) % num_ranks;
      ASSERT_EQ(owner_of[landed], expected) << "row " << i << " of round " << round;
      ASSERT_EQ(landed, offsets[expected] + num_sent[expected]++);
      --left[expected];
      before = expected;
    }
    // As they lie in memory, beginning with those of the rank behind this one; its own come last, if at all.
    std::vector<int> expected_behind(offsets[num_ranks]);
    std::iota(expected_behind.begin(), expected_behind.end(), 0);
    std::rotate(expected_behind.begin(), expected_behind.begin() + offsets[me + 1], expected_behind.end());
    expected_behind.resize(line.size());
    ASSERT_EQ(behind_own, expected_behind);
  }
}

}  // namespace
}  // namespace moe_a2a
