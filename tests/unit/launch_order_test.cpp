// The streams that an object's launches wait for.

#include <gtest/gtest.h>

#include <set>
#include <utility>
#include <vector>

#include "arch/cpu_machine.h"

namespace moe_a2a {
namespace {

class StreamDevice : public CpuMachine {
 public:
  StreamDevice() : CpuMachine(0) {}

  void order_streams(void* earlier, void* later) override { waits.emplace_back(earlier, later); }
  bool is_capturing(void* stream) const override { return capturing.contains(stream); }

  std::vector<std::pair<void*, void*>> waits;  // (earlier, later)
  std::set<void*> capturing;
};

class LaunchOrderTest : public ::testing::Test {
 protected:
  using Waits = std::vector<std::pair<void*, void*>>;

  Waits waits_of(std::initializer_list<void*> streams) {
    device_.waits.clear();
    for (void* stream : streams) order_.next(device_, stream);
    return device_.waits;
  }

  char streams_[3] = {};
  void *a_ = streams_, *b_ = streams_ + 1, *c_ = streams_ + 2;
  StreamDevice device_;
  LaunchOrder order_;
};

TEST_F(LaunchOrderTest, ALaunchFollowsThePreviousOneOnAnotherStream) {
  EXPECT_EQ(waits_of({a_, a_, b_, b_, a_}), (Waits{{a_, b_}, {b_, a_}}));
}

TEST_F(LaunchOrderTest, AfterACaptureALaunchFollowsTheLastOneThatRuns) {
  waits_of({a_});
  device_.capturing = {b_};
  EXPECT_EQ(waits_of({b_, b_}), Waits{});
  device_.capturing = {};
  EXPECT_EQ(waits_of({c_}), (Waits{{a_, c_}}));
}

TEST_F(LaunchOrderTest, ALaunchBetweenTwoOfACaptureChangesNeitherOrder) {
  waits_of({a_});
  device_.capturing = {b_, c_};
  EXPECT_EQ(waits_of({b_, a_, c_, a_}), (Waits{{b_, c_}}));
}

TEST_F(LaunchOrderTest, LaunchesOfACaptureAreOrderedEvenIfOneRanOnItsStreamBefore) {
  waits_of({b_});  // as a warm-up
  device_.capturing = {b_, c_};
  EXPECT_EQ(waits_of({b_, c_}), (Waits{{b_, c_}}));
}

TEST_F(LaunchOrderTest, AForgottenStreamIsNotWaitedFor) {
  waits_of({a_});
  order_.forget(a_);
  EXPECT_EQ(waits_of({b_}), Waits{});
}

}  // namespace
}  // namespace moe_a2a
