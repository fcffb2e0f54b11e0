// What the sanitizers must report, and what absent ranks leave behind.
#include <gtest/gtest.h>

#include <thread>
#include <type_traits>

#include "one_token.h"
#include "thread_ranks.h"

namespace moe_a2a {
namespace {

// ---- a rank that stays away

class Timeout : public ::testing::TestWithParam<int> {};

TEST_P(Timeout, NamesTheMissingRankOnEveryOther) {
  const MoeConfig config = one_token_config(4, GetParam());
  std::barrier all(config.num_ranks);
  run_ranks(config, 0.5, [&](ExpertParallel& ep) {
    if (ep.config().rank != 2) {
      const std::vector<float> x(kRowLength, 1.0f);
      const int32_t expert = ep.config().rank;
      auto handle = ep.dispatch_send({.num_tokens = 1, .topk_idx = {&expert, false}, .x = rows_of(x, kRowLength)}, {});
      try {
        ep.dispatch_recv(*handle, Layout::kRows, 1, {.num_blocks = 3});
        ADD_FAILURE() << "rank " << ep.config().rank << " did not notice";
      } catch (const PeerTimeout& timeout) {
        EXPECT_EQ(timeout.report.culprit, 2) << timeout.what();
        EXPECT_EQ(timeout.report.operation, moe_op::kDispatchRecv);
        EXPECT_EQ(timeout.report.awaited, moe_kind::kTableWait);
        EXPECT_EQ(timeout.report.rank, ep.config().rank);
      }
      EXPECT_THROW(ep.dispatch_send({}, {}), PeerTimeout);  // and it stays that way
    }
    all.arrive_and_wait();
  });
}

INSTANTIATE_TEST_SUITE_P(NumMaxLlTokens, Timeout, ::testing::Values(0, 2));

// The token goes to ranks 1 and 2. One lane waits for both sums, so it meets the refusal first.
TEST(TimeoutOfASum, IsNotHiddenByARefusalThatTheHostHasNotSeen) {
  MoeConfig config = one_token_config(3, 0);
  config.num_topk = 2;
  std::barrier all(config.num_ranks);
  run_ranks(config, 3.0, [&](ExpertParallel& ep) {
    const std::vector<float> x(kRowLength, 1.0f);
    const int32_t experts[] = {1, 2};
    auto handle =
        ep.dispatch({.num_tokens = ep.config().rank == 0, .topk_idx = {experts, false}, .x = rows_of(x, kRowLength)},
                    Layout::kRows, 1, {});
    if (ep.config().rank == 0) {
      std::vector<float> combined(kRowLength);
      ep.combine_send(*handle, {}, {});
      EXPECT_THROW(ep.combine_recv(*handle, combined.data(), {}), PeerTimeout);
      EXPECT_THROW(ep.raise_reported(), PeerTimeout);  // and it stays that way
    } else if (ep.config().rank == 1) {
      ep.refuse_combine(handle.get(), "bad y", {});
    }
    all.arrive_and_wait();
  });
}

// ---- negative control: the sanitizer that watches these tests reports a signal without a release

#if defined(__SANITIZE_THREAD__)
template <Order kStore>
int pass_a_message() {
  Signal signal;
  Reports reports;
  std::remove_pointer_t<decltype(WaitPolicy::poison)> poison = 0;
  int payload = 0;
  HeapView heap{.rank = 0, .num_ranks = 1};
  heap.base[0] = reinterpret_cast<std::byte*>(&signal);
  std::thread sender([&] {
    payload = 42;
    atomic_store<kStore, Scope::kSystem>(&signal.word, Signal::pack(1, 0));
  });
  uint32_t num_reports[Reports::kNum] = {};
  const WaitPolicy policy{
      .timeout_ticks = 5 * kClockTicksPerSecond, .reports = &reports, .num_reports = num_reports, .poison = &poison};
  EXPECT_TRUE(wait_for(&signal, 1, {moe_op::kDispatchRecv, moe_kind::kRowWait, 0}, policy, heap));
  const int received = payload;
  sender.join();
  return received;
}

TEST(ThreadSanitizer, AcceptsTheSignal) { EXPECT_EQ(pass_a_message<kSignalOrder>(), 42); }

TEST(ThreadSanitizerDeathTest, SeesARelaxedSignal) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH({ std::exit(pass_a_message<Order::kRelaxed>() == 42 ? 0 : 1); }, "data race");
}
#endif

}  // namespace
}  // namespace moe_a2a
