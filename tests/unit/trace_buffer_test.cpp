// What a record holds, how segments fill up and continue, and what the host reads back from a traced rank.
#include "comm/trace_buffer.h"

#include <gtest/gtest.h>

#include <vector>

#include "alone.h"
#include "moe/expert_parallel.h"
#include "rows_of.h"
#include "trace_records.h"

namespace moe_a2a {
namespace {

// ---- records

TEST(TraceRecord, KeepsItsFieldsApart) {
  const TraceFields ones(TraceRecord::pack({.kind = static_cast<TraceKind>(31),
                                            .begin = ~uint64_t{0},
                                            .peer = 63,
                                            .token = (1 << 20) - 1,
                                            .polls = ~uint32_t{0}},
                                           ~uint64_t{0}));
  EXPECT_EQ(ones.begin, 0xffffffffffffu);
  EXPECT_EQ(ones.polls, 65535u);
  EXPECT_EQ(ones.duration, 0xffffffffu);
  EXPECT_EQ(ones.kind, TraceKind{31});
  EXPECT_EQ(ones.peer, 63u);
  EXPECT_EQ(ones.token, 0xfffffu);
  EXPECT_EQ(ones.has_peer, 1u);
  const TraceFields plain(TraceRecord::pack(
      {.kind = moe_kind::kRowWait, .begin = (uint64_t{5} << 48) + 77, .peer = 0, .token = 9, .polls = 65535}, 12));
  EXPECT_EQ(plain.begin, 77u);
  EXPECT_EQ(plain.polls, 65535u);
  EXPECT_EQ(plain.duration, 12u);
  EXPECT_EQ(plain.kind, moe_kind::kRowWait);
  EXPECT_EQ(plain.peer, 0u);
  EXPECT_EQ(plain.token, 9u);
  EXPECT_EQ(plain.has_peer, 1u);
  const TraceFields bare(TraceRecord::pack({.kind = moe_kind::kLists, .begin = 1}, 0xffffffff));
  EXPECT_EQ(bare.duration, 0xffffffffu);
  EXPECT_EQ(bare.token, 0xfffffu);
  EXPECT_EQ(bare.peer, 0u);
  EXPECT_EQ(bare.has_peer, 0u);
}

TEST(TraceRecord, HasRoomForEveryKindRankAndToken) {
  EXPECT_LE(static_cast<int>(TraceKind::kLimit), 32);
  EXPECT_LE(kMaxRanks, 64);
  EXPECT_LT(static_cast<uint64_t>(kMaxTokensPerRank), TraceRecord::kNoToken);
}

TEST(Operation, IsFoundByItsName) {
  for (const Vocabulary& words : {kCommVocabulary, kMoeVocabulary}) {
    for (const char* name : words.operations) EXPECT_STREQ(words.name_of(words.operation_named(name)), name);
  }
  EXPECT_EQ(kMoeVocabulary.operation_named("no such launch"), Operation::kNone);
}

// ---- segments

constexpr int kRoom = 10, kBlocks = 3;

// Memory of exactly the size that the buffer needs, between guards.
struct Guarded {
  static constexpr uint64_t kGuard = 0x5ca1ab1e;
  static constexpr TraceRecord kNone{{kGuard, kGuard}};

  std::vector<uint64_t> attempts = std::vector<uint64_t>(kBlocks);
  std::vector<TraceRecord> memory = std::vector<TraceRecord>(kBlocks * kRoom + 2, kNone);
  TraceBuffer buffer{attempts.data(), memory.data() + 1, kRoom};

  // One launch of `block`, which leaves `num_records` records and its own.
  void launch(const TraceBuffer& trace, int block, int num_records) {
    Block::Scratch scratch;
    const Block leader(scratch);
    open_segment(trace, Grid{block, kBlocks}, leader);
    for (int i = 0; i < num_records; ++i) {
      record(trace, leader, {.kind = TraceKind::kSend, .begin = trace_now(), .peer = block, .token = i});
    }
    close_segment(trace, leader, static_cast<int>(moe_op::kDispatchSend));
  }
  bool is_untouched(size_t i) const { return memory[i].word[0] == kGuard && memory[i].word[1] == kGuard; }
};

TEST(TraceBuffer, FullSegmentDropsAndCountsAndTouchesNothingElse) {
  Guarded trace;
  trace.launch(trace.buffer, 1, 1000);
  EXPECT_EQ(trace.attempts, (std::vector<uint64_t>{0, 1001, 0}));
  for (size_t i = 0; i < trace.memory.size(); ++i) {
    EXPECT_EQ(trace.is_untouched(i), i < 1 + kRoom || i >= 1 + 2 * kRoom) << i;
  }
  for (int i = 0; i < kRoom; ++i) EXPECT_EQ(TraceFields(trace.memory[1 + kRoom + i]).token, static_cast<uint64_t>(i));
}

TEST(TraceBuffer, LaunchesGoOnWhereTheOnesBeforeStopped) {
  Guarded trace;
  for (int launch = 0; launch < 6; ++launch) {
    for (int block = 0; block < kBlocks; ++block) trace.launch(trace.buffer, block, block);
  }
  EXPECT_EQ(trace.attempts, (std::vector<uint64_t>{6, 12, 18}));
  EXPECT_EQ(trace.buffer.written(6), 6u);
  EXPECT_EQ(trace.buffer.written(18), 10u);
  EXPECT_TRUE(trace.is_untouched(0));
  for (int i = 0; i < kRoom; ++i) EXPECT_EQ(trace.is_untouched(1 + i), i >= 6) << i;
  EXPECT_TRUE(trace.is_untouched(trace.memory.size() - 1));
  const TraceFields last(trace.memory[1 + 5]);
  EXPECT_EQ(last.kind, TraceKind::kKernel);
  EXPECT_EQ(last.token, static_cast<uint64_t>(moe_op::kDispatchSend));
}

TEST(TraceBuffer, IsOffForAWarpThatOpensNoSegment) {
  Guarded trace;
  trace.launch(trace.buffer, 1, 2);
  EXPECT_FALSE(trace_is_on());
  EXPECT_EQ(trace_now(), 0u);
}

// ---- a traced rank

struct TracedRank {
  TracedRank()
      : ep(alone(),
           {.num_experts = 4, .num_topk = 2, .hidden = 8, .num_max_tokens_per_rank = 4, .dtype = DType::kFloat32}) {
    ep.connect({ep.handle()});
  }

  // Three tokens there and back: kernel, route and lists once each; send, signal, sum, signal, reduce for each token.
  void layer() {
    auto handle = ep.dispatch_send({.num_tokens = 3, .topk_idx = {topk_idx.data(), false}, .x = rows_of(x, 8)}, {});
    ep.dispatch_recv(*handle, Layout::kRows, 1, {});
    const std::vector<float> y(6 * 8, 1.0f);
    ep.combine_send(*handle, {.y = rows_of(y, 8), .num_y_rows = 6}, {});
    std::vector<float> combined(3 * 8);
    ep.combine_recv(*handle, combined.data(), {});
  }
  static constexpr size_t kRecordsPerLayer = 4 + 1 + 1 + 3 * 5;

  std::vector<int32_t> topk_idx = {0, 1, 2, 2, 3, 0};
  std::vector<float> x = std::vector<float>(3 * 8, 1.5f);
  ExpertParallel ep;
};

TEST(Tracer, ReadsWhatTheKernelsLeave) {
  TracedRank rank;
  rank.layer();
  EXPECT_TRUE(rank.ep.tracer().read().records.empty());
  rank.ep.tracer().start(100);
  rank.layer();
  rank.layer();
  rank.ep.tracer().stop();
  rank.layer();
  const TraceDump dump = rank.ep.tracer().read();
  EXPECT_EQ(dump.records.size(), 2 * TracedRank::kRecordsPerLayer);
  EXPECT_EQ(dump.segment_written[0], static_cast<int64_t>(dump.records.size()));
  EXPECT_EQ(count(dump, TraceKind::kKernel), 8);
  EXPECT_EQ(count(dump, TraceKind::kSignal), 12);
  for (const TraceKind kind : {TraceKind::kSend, moe_kind::kSum, TraceKind::kReduce}) {
    EXPECT_EQ(count(dump, kind), 6) << static_cast<int>(kind);
  }
  rank.ep.tracer().start(100);  // empty again
  EXPECT_TRUE(rank.ep.tracer().read().records.empty());
}

TEST(Tracer, WrittenAndDroppedAreAllThereWas) {
  TracedRank rank;
  rank.ep.tracer().start(10);
  for (int layer = 0; layer < 7; ++layer) rank.layer();
  const TraceDump dump = rank.ep.tracer().read();
  EXPECT_EQ(dump.segment_written[0], 10);
  EXPECT_EQ(dump.segment_dropped[0], static_cast<int64_t>(7 * TracedRank::kRecordsPerLayer - 10));
  EXPECT_EQ(dump.records.size(), 10u);
}

TEST(Tracer, EveryBlockHasItsOwnSegment) {
  TracedRank rank;
  rank.ep.tracer().start(10);
  auto handle = rank.ep.dispatch_send(
      {.num_tokens = 3, .topk_idx = {rank.topk_idx.data(), false}, .x = rows_of(rank.x, 8)}, {.num_blocks = 2});
  const TraceDump dump = rank.ep.tracer().read();
  EXPECT_EQ(dump.segment_written[0], 1 + 1 + 2 * 2);  // kernel, route, two tokens sent
  EXPECT_EQ(dump.segment_written[1], 1 + 2);
}

TEST(Tracer, RefusesSizesThatMakeNoSense) {
  TracedRank rank;
  EXPECT_THROW(rank.ep.tracer().start(0), std::invalid_argument);
  EXPECT_THROW(rank.ep.tracer().start(int64_t{1} << 31), std::invalid_argument);
  EXPECT_THROW(rank.ep.communicator().align_clocks(1, nullptr), std::invalid_argument);
  EXPECT_THROW(rank.ep.communicator().align_clocks(kMaxClockRounds + 1, nullptr), std::invalid_argument);
}

}  // namespace
}  // namespace moe_a2a
