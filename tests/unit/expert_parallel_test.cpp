// The host object: buffers, handles, refused calls. A single rank, which is its own peer.
#include "moe/expert_parallel.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "alone.h"
#include "rows_of.h"
#include "unit/expect_says.h"

namespace moe_a2a {
namespace {

constexpr int kTokens = 3, kHidden = 10, kTopk = 2;

MoeConfig config_of_one(int num_buffers) {
  return {.num_experts = 4,
          .num_topk = kTopk,
          .hidden = kHidden,
          .num_max_tokens_per_rank = 8,
          .num_buffers = num_buffers,
          .dtype = DType::kFloat32};
}

struct Rank {
  explicit Rank(int num_buffers = 2) : ep(alone(), config_of_one(num_buffers)) { ep.connect({ep.handle()}); }

  std::shared_ptr<DispatchHandle> send() {
    return ep.dispatch_send({.num_tokens = kTokens, .topk_idx = {topk_idx.data(), false}, .x = rows_of(x, kHidden)},
                            {});
  }
  std::shared_ptr<DispatchHandle> dispatch() {
    auto handle = send();
    ep.dispatch_recv(*handle, Layout::kRows, 1, {});
    return handle;
  }
  // Identity experts, so that the result is x times the number of choices.
  void combine_send(DispatchHandle& handle) {
    const MoeRegion& region = ep.region();
    const int num_routes = region.expert_offsets(handle.buffer, ep.config().num_local_experts);
    y.assign(static_cast<size_t>(ep.config().route_capacity()) * kHidden, -1.0f);
    for (int i = 0; i < num_routes; ++i) {
      const int row = region.expert_row_index(handle.buffer, i);
      const auto* values = reinterpret_cast<const float*>(region.row.at(handle.buffer, 0, row));
      for (int c = 0; c < kHidden; ++c) y[i * kHidden + c] = values[c];
    }
    ep.combine_send(handle, {.y = rows_of(y, kHidden), .num_y_rows = ep.config().route_capacity()}, {});
  }
  void combine(DispatchHandle& handle) {
    combine_send(handle);
    combined.assign(kTokens * kHidden, -1.0f);
    ep.combine_recv(handle, combined.data(), {});
    for (int i = 0; i < kTokens * kHidden; ++i) EXPECT_EQ(combined[i], 2 * x[i]);
  }

  ExpertParallel ep;
  std::vector<int32_t> topk_idx = {0, 1, 2, 2, 3, 0};
  std::vector<float> x = std::vector<float>(kTokens * kHidden, 1.5f), y, combined;
};

template <class Call>
std::string message_of(Call call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

TEST(ExpertParallel, TakesBuffersInTurn) {
  Rank rank(3);
  for (int call = 0; call < 7; ++call) {
    auto handle = rank.dispatch();
    EXPECT_EQ(handle->buffer, call % 3);
    rank.combine(*handle);
  }
}

TEST(ExpertParallel, ThirdOpenHandleRaisesAndLeavesTheOthers) {
  Rank rank(2);
  auto first = rank.dispatch(), second = rank.dispatch();
  expect_says(message_of([&] { rank.send(); }), "2 handles are open on rank 0 and num_buffers=2");
  rank.combine(*second);
  auto third = rank.dispatch();
  EXPECT_EQ(third->buffer, second->buffer);
  rank.combine(*first);
  rank.combine(*third);
}

TEST(ExpertParallel, DroppedHandlesAreTakenBack) {
  Rank rank(2);
  for (int call = 0; call < 6; ++call) rank.dispatch();
  rank.combine(*rank.dispatch());
}

TEST(ExpertParallel, ReleaseGivesTheBufferBack) {
  Rank rank(1);
  for (int call = 0; call < 3; ++call) {
    auto handle = rank.dispatch();
    rank.ep.release(*handle, {});
    rank.ep.release(*handle, {});  // a second release has no effect
    expect_says(message_of([&] { rank.combine(*handle); }), "closed");
  }
}

TEST(ExpertParallel, StaleHandleAndWrongOrderRaise) {
  Rank rank;
  auto handle = rank.dispatch();
  expect_says(message_of([&] { rank.ep.dispatch_recv(*handle, Layout::kRows, 1, {}); }), "dispatch_recv");
  expect_says(message_of([&] { rank.ep.combine_recv(*handle, rank.combined.data(), {}); }), "combine_recv");
  rank.combine(*handle);
  expect_says(message_of([&] { rank.combine_send(*handle); }), "a handle serves one combine");
  auto unreceived = rank.send();
  expect_says(message_of([&] { rank.combine_send(*unreceived); }), "sent, not yet received");
}

TEST(ExpertParallel, ForeignHandleRaises) {
  Rank rank, other;
  auto handle = other.dispatch();
  expect_says(message_of([&] { rank.ep.release(*handle, {}); }), "another ExpertParallel");
  expect_says(message_of([&] { rank.combine_send(*handle); }), "another ExpertParallel");
  other.combine(*handle);
}

TEST(ExpertParallel, NothingWorksAfterCloseOrBeforeConnect) {
  Rank rank;
  auto handle = rank.dispatch();
  rank.ep.close();
  rank.ep.close();
  EXPECT_TRUE(rank.ep.is_closed());
  expect_says(message_of([&] { rank.send(); }), "closed");
  expect_says(message_of([&] { rank.combine_send(*handle); }), "closed");

  ExpertParallel unconnected(alone(), config_of_one(2));
  expect_says(message_of([&] { unconnected.dispatch_send({}, {}); }), "set_comm_handles");
  expect_says(message_of([&] { unconnected.connect({}); }), "got 0 handles for num_ranks=1");
  unconnected.connect({unconnected.handle()});
  expect_says(message_of([&] { unconnected.connect({unconnected.handle()}); }), "already set");
}

struct Interruptible : ExpertParallel {
  using ExpertParallel::ExpertParallel;
  void interrupt() { device_->interrupt(); }
};

TEST(ExpertParallel, ASignalDuringALocalKernelEndsThatCall) {
  const MoeConfig config = config_of_one(2);
  Interruptible ep(alone(), config);
  ep.connect({ep.handle()});
  const std::vector<int32_t> topk_idx(kTopk);
  const std::vector<float> x(kHidden, 1.5f);
  const auto handle = ep.dispatch({.num_tokens = 1, .topk_idx = {topk_idx.data(), false}, .x = rows_of(x, kHidden)},
                                  Layout::kExpertMajor, 1, {});
  std::vector<float> expert_x(ep.num_positions(*handle) * kHidden);
  ep.interrupt();  // as the thread that launches does when a handler has raised
  EXPECT_THROW(ep.gather_rows(*handle, expert_x.data(), nullptr, false, {}), Interrupted);
  expect_says(message_of([&] { ep.check(); }), "an earlier call was interrupted");
}

TEST(ExpertParallel, CountsIdsOutOfRangeAndShortY) {
  Rank rank;
  rank.topk_idx[3] = 99;
  expect_says(message_of([&] { rank.send(); }), "topk_idx[1] has 99, not in [-1, num_experts=4)");
  Rank fresh;
  auto handle = fresh.dispatch();
  const CombineInput short_y{.y = rows_of(fresh.x, kHidden), .num_y_rows = 3};
  expect_says(message_of([&] { fresh.ep.combine_send(*handle, short_y, {}); }),
              "y of a combine was too short for 3 routes");
}

TEST(ExpertParallel, SaysItsSizeBeforeItIsMade) {
  Rank rank;
  EXPECT_EQ(rank.ep.nbytes(), ExpertParallel::nbytes_for(config_of_one(2)));
  EXPECT_LT(ExpertParallel::nbytes_for(config_of_one(1)), ExpertParallel::nbytes_for(config_of_one(2)));
}

TEST(Device, UnknownTargetNamesThoseThatAreBuilt) {
  expect_says(message_of([] { make_device("abacus", 0); }), "no target \"abacus\" (it has: cpu");
}

}  // namespace
}  // namespace moe_a2a
