// Threads that share one object: calls are serialised, close() ends a wait, trace and check work beside calls.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "one_token.h"
#include "thread_ranks.h"

namespace moe_a2a {
namespace {

void call(ExpertParallel& ep, int num_blocks) {
  const LaunchPlace place{.num_blocks = num_blocks};
  combine_one(ep, *dispatch_one(ep, 1.5f, place), 2.5f, place);
}

class Threads : public ::testing::TestWithParam<int> {};

TEST_P(Threads, CloseEndsTheWaitOfAnotherThread) {
  for (const int milliseconds : {0, 1, 20}) {
    std::barrier both(2);
    run_ranks(one_token_config(2, GetParam()), 20.0, [&](ExpertParallel& ep) {
      if (ep.config().rank == 0) {
        std::string said;
        std::thread waiting([&] {
          try {
            call(ep, 3);
          } catch (const std::runtime_error& error) {
            said = error.what();
          }
        });
        std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
        ep.close();
        waiting.join();
        // Before its turn, or during it.
        EXPECT_TRUE(said.find("close") != std::string::npos) << said;
        EXPECT_TRUE(ep.is_closed());
        EXPECT_THROW(ep.check(), std::runtime_error);
      }
      both.arrive_and_wait();
      if (ep.config().rank == 1 && milliseconds == 20) {
        const auto start = std::chrono::steady_clock::now();
        EXPECT_THROW(call(ep, 1), PeerTimeout);  // told, long before its deadline
        EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
      }
      both.arrive_and_wait();
    });
  }
}

TEST_P(Threads, CallsChecksAndTracesTakeTurns) {
  run_ranks(one_token_config(3, GetParam()), 60.0, [&](ExpertParallel& ep) {
    std::mutex order;  // all ranks make the same calls in the same order, from whichever thread
    std::atomic<bool> stop = false;
    std::thread watcher([&] {
      while (!stop) {
        ep.check();
        const auto turn = ep.enter();
        ep.tracer().start(64);
        (void)ep.tracer().read();
        ep.tracer().stop();
        std::this_thread::yield();
      }
    });
    std::vector<std::thread> callers;
    for (int i = 0; i < 3; ++i) {
      callers.emplace_back([&] {
        for (int n = 0; n < 10; ++n) {
          const std::lock_guard lock(order);
          call(ep, 2);
        }
      });
    }
    for (std::thread& caller : callers) caller.join();
    stop = true;
    watcher.join();
  });
}

TEST_P(Threads, SeveralThreadsMayClose) {
  run_ranks(one_token_config(2, GetParam()), 20.0, [&](ExpertParallel& ep) {
    call(ep, 2);
    std::vector<std::thread> closers;
    for (int i = 0; i < 4; ++i) closers.emplace_back([&] { ep.close(); });
    for (std::thread& closer : closers) closer.join();
    EXPECT_TRUE(ep.is_closed());
  });
}

INSTANTIATE_TEST_SUITE_P(NumMaxLlTokens, Threads, ::testing::Values(0, 2));

}  // namespace
}  // namespace moe_a2a
