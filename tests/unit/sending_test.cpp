// How sending is divided: sequences of units, the work queue, the schedules of a combine, the shared memory of a
// sending block.

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <tuple>
#include <vector>

#include "comm/work_queue.h"
#include "moe/combine/combine_send.h"
#include "seed.h"
#include "unit/heaps.h"
#include "unit/random.h"

namespace moe_a2a {
namespace {

MoeConfig config_of(int num_ranks, int num_tokens) {
  return {.num_ranks = num_ranks,
          .num_experts = num_ranks,
          .num_topk = 1,
          .hidden = 2,
          .num_max_tokens_per_rank = num_tokens};
}

TEST(RoundRobin, DealsTheUnitsOfAllSegmentsRoundRobin) {
  Random random(test_seed());
  for (int round = 0; round < 300; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    std::vector<int> segments(random.pick(0, 6));
    for (int& num_units : segments) num_units = random.pick(0, 3) == 0 ? 0 : random.pick(0, 12);
    const int num_workers = random.pick(1, 9);
    std::vector<int> expected, workers;  // the worker of each of all units
    for (int i = 0; i < std::accumulate(segments.begin(), segments.end(), 0); ++i) expected.push_back(i % num_workers);
    workers.resize(expected.size(), -1);
    for (int w = 0; w < num_workers; ++w) {
      RoundRobin<> turns(w, num_workers);
      int before = 0, last = -1;
      for (const int num_units : segments) {
        ASSERT_TRUE(turns.walk(num_units, [&](int unit) {
          EXPECT_LT(unit, num_units);
          EXPECT_GT(before + unit, last);
          last = before + unit;
          EXPECT_EQ(workers[last], -1);
          workers[last] = w;
          return true;
        }));
        before += num_units;
      }
    }
    ASSERT_EQ(workers, expected);
  }
}

TEST(RoundRobin, StopsAtAVisitThatReturnsFalse) {
  RoundRobin<> turns(1, 2);
  int num_visits = 0;
  EXPECT_FALSE(turns.walk(10, [&](int unit) {
    ++num_visits;
    return unit < 5;
  }));
  EXPECT_EQ(num_visits, 3);  // 1, 3, 5
}

TEST(WorkQueue, HandsOutEachUnitOnce) {
  for (int num_blocks = 1; num_blocks < 6; ++num_blocks) {
    for (int num_units = 0; num_units < 20; ++num_units) {
      std::vector<int> taken(num_units);
      uint32_t ticket = 0;
      for (int b = 0; b < num_blocks; ++b) {
        Block::Scratch scratch;
        const Block block(scratch);
        WorkQueue(Grid{b, num_blocks}, block, 1, &ticket).walk(num_units, [&](int unit) { ++taken[unit]; });
      }
      EXPECT_EQ(taken, std::vector<int>(num_units, 1));
      EXPECT_EQ(ticket, 0u);  // on the CPU the units go round-robin
    }
  }
}

// ---- the schedules of a combine. dispatch_recv writes the order of whole rows: see expert_lists_test.cpp.

TEST(CombineSchedule, SendsPiecesAsTheRowsLieOwnRowsLast) {
  Random random(test_seed());
  for (int round = 0; round < 500; ++round) {
    const int num_ranks = random.pick(1, 9);
    Heaps heaps(config_of(num_ranks, 20));
    const int me = random.pick(0, num_ranks - 1);
    const Context& c = heaps.context[me];
    int32_t* offsets = c.region.landed_offsets.at(0);
    for (int r = 0; r < num_ranks; ++r) {
      offsets[r + 1] = offsets[r] + (random.pick(0, 2) == 0 ? 0 : random.pick(0, 20));
      for (int i = offsets[r]; i < offsets[r + 1]; ++i) c.region.landed_row(0, i) = r * 20 + (i - offsets[r]);
    }
    const CombineSendArgs args{.context = c, .presummed = true};
    const bool keeps_own = random.pick(0, 1) == 1;
    const OwnSums own(keeps_own ? &args : nullptr);
    const CombineSchedule<LlWire> schedule(c, 0, own);
    std::vector<int> expected(offsets[num_ranks]), rows;
    std::iota(expected.begin(), expected.end(), 0);
    std::rotate(expected.begin(), expected.begin() + offsets[me + 1], expected.end());
    if (keeps_own) expected.resize(expected.size() - (offsets[me + 1] - offsets[me]));
    for (int& landed : expected) landed = c.region.landed_row(0, landed);
    ASSERT_EQ(schedule.num_rows(), static_cast<int>(expected.size()));
    for (int i = 0; i < schedule.num_rows(); ++i) {
      const Scheduled scheduled = schedule.at(Warp{}, i);
      rows.push_back(scheduled.row);
      const int owner = scheduled.delivery.first_dst_rank;
      ASSERT_EQ(scheduled.delivery.dst_ranks.bits, RankSet::only(owner).bits);
      ASSERT_EQ(owner * 20 + scheduled.delivery.token, scheduled.row);
    }
    ASSERT_EQ(rows, expected);
    c.region.has_given_up(0) = 1;
    ASSERT_EQ((CombineSchedule<LlWire>(c, 0, own).num_rows()), 0);
  }
}

// ---- shared memory

TEST(RowWire, QuantisesRowsUpToItsLimitAndNoLongerOnes) {
  for (int64_t shared_bytes = 4 << 10; shared_bytes <= 256 << 10; shared_bytes += 1000) {
    const auto plan_for = [&](int64_t row_bytes) {
      return RowWire::plan(warp_staging_bytes(row_bytes, StagedFor::kQuantizing), shared_bytes);
    };
    const int64_t most = RowWire::max_quantized_row_bytes(shared_bytes);
    ASSERT_GT(most, shared_bytes / 4);
    for (const int64_t row_bytes : {most / 9, most / 2, most - 1, most}) {
      const RowWire::Plan plan = plan_for(row_bytes);
      ASSERT_GE(plan.stage_bytes, row_bytes);
      ASSERT_GE(plan.num_stages, 1);
      ASSERT_GE(plan.stages.offset, plan.queue.offset + RowWire::Queue::shared_bytes());
      ASSERT_GE(plan.bytes, plan.stages.offset + int64_t{plan.stage_bytes} * plan.num_stages);
      ASSERT_LE(plan.bytes, shared_bytes);
    }
    ASSERT_EQ(plan_for(most + 1).stage_bytes, 0);
  }
}

TEST(RowWire, FillsTheLinksWithAsFewSendersAsItCan) {
  for (const int in_flight : {1, 600 << 10, 1 << 30}) {
    for (const int per_warp : {2, 4096, 36 * 14336, 44 * 14336, 600 << 10, 132 * 14336}) {
      const int64_t senders = senders_for(in_flight, per_warp);
      ASSERT_GE(senders, 1);
      ASSERT_GE(senders * per_warp, in_flight);
      ASSERT_TRUE(senders == 1 || (senders - 1) * per_warp < in_flight);
    }
  }
}

TEST(RowWire, CopiesOnlyRowsOfWholeVectorsInBulk) {
  alignas(16) std::byte memory[64];
  const RowLayout whole{1024, DType::kBfloat16}, odd{1020, DType::kBfloat16};
  const RowLayout float8{1024, DType::kFloat8}, three_scales{384, DType::kFloat8};
  const Rows rows{memory, 4096}, scales{memory + 16, 32};
  EXPECT_EQ(staged_for_sending(whole, rows), StagedFor::kSending);
  EXPECT_EQ(staged_for_sending(float8, rows, scales), StagedFor::kSending);
  for (const auto& [layout, x, x_scales] : {std::tuple{whole, Rows{memory + 2, 4096}, Rows{}},
                                            {whole, Rows{memory, 4100}, {}},
                                            {odd, rows, {}},
                                            {three_scales, rows, scales},
                                            {float8, rows, {memory + 4, 32}},
                                            {float8, rows, {memory, 36}}}) {
    EXPECT_EQ(staged_for_sending(layout, x, x_scales), StagedFor::kStoring);
  }
}

}  // namespace
}  // namespace moe_a2a
