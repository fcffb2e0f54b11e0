// The trace under traffic: overflow under address sanitizer, clocks and recorded waits under thread sanitizer.
#include <gtest/gtest.h>

#include <algorithm>

#include "thread_ranks.h"
#include "trace_records.h"
#include "traffic.h"

namespace moe_a2a {
namespace {

MoeConfig traced_config(int num_ranks, int num_max_ll_tokens = 0) {
  return {.num_ranks = num_ranks,
          .num_experts = 2 * num_ranks,
          .num_topk = 2,
          .hidden = 16,
          .num_max_tokens_per_rank = 5,
          .dtype = DType::kFloat32,
          .num_max_ll_tokens = num_max_ll_tokens};
}

// One dispatch and combine; y is zeros, since values do not matter here.
void layer(ExpertParallel& ep, int round, const LaunchPlace& place) {
  const Tokens tokens(7, ep.config(), ep.config().rank, round);
  const int64_t row_bytes = ep.config().hidden * sizeof(float);
  auto handle = ep.dispatch_send({.num_tokens = tokens.count,
                                  .topk_idx = {tokens.topk_idx.data(), true},
                                  .topk_weights = tokens.weights.data(),
                                  .x = {tokens.x.data(), row_bytes},
                                  .x_scales = {}},
                                 place);
  ep.dispatch_recv(*handle, Layout::kRows, 1, place);
  const std::vector<std::byte> y(ep.config().route_capacity() * row_bytes);
  ep.combine_send(*handle, {.y = {y.data(), row_bytes}, .num_y_rows = ep.config().route_capacity()}, place);
  std::vector<std::byte> combined(ep.config().num_max_tokens_per_rank * row_bytes);
  ep.combine_recv(*handle, combined.data(), place);
}

// ---- overflow, where one record too many would hit other memory

TEST(Overflow, StaysInTheSegment) {
  constexpr int kRoom = 10, kBlocks = 4;
  std::vector<uint64_t> attempts(kBlocks);
  std::vector<TraceRecord> records(kBlocks * kRoom);
  const TraceBuffer trace{attempts.data(), records.data(), kRoom};
  std::vector<std::thread> blocks;
  for (int b = 0; b < kBlocks; ++b) {
    blocks.emplace_back([&, b] {
      for (int launch = 0; launch < 3; ++launch) {
        Block::Scratch scratch;
        const Block block(scratch);
        open_segment(trace, Grid{b, kBlocks}, block);
        for (int i = 0; i < 25; ++i) {
          record(trace, block, {.kind = TraceKind::kSend, .begin = trace_now(), .token = b});
        }
        close_segment(trace, block, 0);
      }
    });
  }
  for (std::thread& block : blocks) block.join();
  EXPECT_EQ(attempts, std::vector<uint64_t>(kBlocks, 3 * 26));
  for (int i = 0; i < kBlocks * kRoom; ++i) {
    EXPECT_EQ(TraceFields(records[i]).token, static_cast<uint64_t>(i / kRoom)) << i;
  }
}

// ---- traffic with the trace on, then off

class TracedTraffic : public ::testing::TestWithParam<int> {};

TEST_P(TracedTraffic, LeavesEveryRecord) {
  run_ranks(traced_config(3, GetParam()), 20.0, [](ExpertParallel& ep) {
    ep.tracer().start(4000);
    for (int round = 0; round < 40; ++round) layer(ep, round, {.num_blocks = 1 + round % 3});
    ep.tracer().stop();
    for (int round = 40; round < 50; ++round) layer(ep, round, {});
    const TraceDump dump = ep.tracer().read();
    EXPECT_EQ(*std::max_element(dump.segment_dropped.begin(), dump.segment_dropped.end()), 0);
    EXPECT_EQ(count(dump, TraceKind::kKernel), ep.device().warps_per_block() * 4 * (14 * 1 + 13 * 2 + 13 * 3));
    EXPECT_EQ(count(dump, TraceKind::kGaveUp), 0);
  });
}

// No batch is small, some are, all are.
INSTANTIATE_TEST_SUITE_P(NumMaxLlTokens, TracedTraffic, ::testing::Values(0, 2, 5));

// ---- a rank stays away: the other ranks' last records can still be read

TEST(TracedTimeout, LastRecordSaysWhichWaitWasGivenUp) {
  std::barrier all(3);
  run_ranks(traced_config(3), 0.3, [&](ExpertParallel& ep) {
    ep.tracer().start(100);
    if (ep.config().rank != 2) {
      EXPECT_THROW(layer(ep, 0, {}), PeerTimeout);
      const TraceDump dump = ep.tracer().read();
      ASSERT_EQ(count(dump, TraceKind::kGaveUp), 1);
      const auto given_up = std::find_if(dump.records.begin(), dump.records.end(), [](const TraceRecord& record) {
        return TraceFields(record).kind == TraceKind::kGaveUp;
      });
      EXPECT_EQ(TraceFields(given_up[-1]).kind, moe_kind::kTableWait);
      EXPECT_EQ(TraceFields(given_up[1]).kind, TraceKind::kKernel);
      EXPECT_EQ(TraceFields(*given_up).peer, 2u);
    }
    all.arrive_and_wait();
  });
}

// ---- clocks: all threads share one, so every measured offset must be within its stated error of zero

TEST(Clocks, DifferByNoMoreThanTheStatedError) {
  for (int num_ranks = 1; num_ranks <= 5; ++num_ranks) {
    run_ranks(traced_config(num_ranks), 20.0, [&](ExpertParallel& ep) {
      for (int time = 0; time < 3; ++time) {
        const std::vector<ClockReading> readings = ep.communicator().align_clocks(20, nullptr);
        ASSERT_EQ(readings.size(), static_cast<size_t>(num_ranks));
        for (int peer = 0; peer < num_ranks; ++peer) {
          const ClockReading& reading = readings[peer];
          EXPECT_GT(reading.round_trip, 0u);
          EXPECT_LT(reading.round_trip, ep.device().clock_ticks_per_second());
          EXPECT_LE(std::abs(reading.offset), static_cast<int64_t>(reading.round_trip / 2 + 1));
          EXPECT_TRUE(peer != ep.config().rank || reading.offset == 0);
        }
        EXPECT_EQ(ep.communicator().clock_step(), readings[ep.config().rank].round_trip);
        layer(ep, time, {});
      }
    });
  }
}

TEST(Clocks, AnAbsentRankIsATimeout) {
  std::barrier all(3);
  run_ranks(traced_config(3), 0.3, [&](ExpertParallel& ep) {
    if (ep.config().rank != 1) {
      try {
        ep.communicator().align_clocks(20, nullptr);
        ADD_FAILURE() << "rank " << ep.config().rank << " did not notice";
      } catch (const PeerTimeout& timeout) {
        EXPECT_EQ(timeout.report.operation, Operation::kAlignClocks);
        EXPECT_EQ(timeout.report.culprit, 1) << timeout.what();
      }
    }
    all.arrive_and_wait();
  });
}

}  // namespace
}  // namespace moe_a2a
