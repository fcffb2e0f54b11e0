// The protocol in every small case, in every schedule within a bound. Then each of its parts is broken in turn, and
// some case must catch it. docs/protocol_tests.md shows the printed tables.
#include <gtest/gtest.h>

#include <cctype>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <optional>

#include "scenarios.h"
#include "seed.h"

namespace moe_a2a {
namespace {

constexpr int kMaxDelays = 3;
constexpr int64_t kRandomSchedules = 5'000;

// Per case and number of delays: enough for all schedules with two delays of the smaller cases; those with three are
// millions. MOE_A2A_SCHEDULES=1000000 searches deeper.
int64_t max_schedules(const Scenario& scenario, int delays) {
  const char* asked = std::getenv("MOE_A2A_SCHEDULES");
  return (asked != nullptr ? std::atoll(asked) : delays < kMaxDelays ? 20'000 : 10'000) / scenario.schedule_divisor;
}

class ProtocolTest : public ::testing::TestWithParam<Scenario> {};

// With release stores, as on the CPU, and with one fence before relaxed stores, as on the GPUs.
TEST_P(ProtocolTest, HoldsInEverySchedule) {
  for (const bool by_fence : {false, true}) {
    std::printf("  %-36s %-8s", GetParam().name.c_str(), by_fence ? "fence" : "release");
    for (int bound = 0; bound <= (by_fence ? 1 : kMaxDelays); ++bound) {
      World world(GetParam());
      const int64_t most = max_schedules(GetParam(), bound);
      const Exploration found = Explorer(world, {.signals_by_fence = by_fence}).all(bound, most);
      std::printf(" %6" PRId64 "%s", found.num_schedules, found.complete ? " " : "+");
      ASSERT_EQ(found.failure, "") << found.trace;
      if (!found.complete) break;  // a larger bound starts with the same schedules
    }
    std::printf("\n");
  }
}

TEST_P(ProtocolTest, HoldsInRandomSchedules) {
  const uint64_t seed = test_seed();
  World world(GetParam());
  const Exploration found = Explorer(world, {}).random(seed, kRandomSchedules / GetParam().schedule_divisor);
  EXPECT_EQ(found.failure, "");
}

std::string test_name(const ::testing::TestParamInfo<Scenario>& info) {
  std::string name = info.param.name;
  std::erase(name, ',');
  for (char& letter : name) letter = std::isalnum(static_cast<unsigned char>(letter)) ? letter : '_';
  return name;
}

INSTANTIATE_TEST_SUITE_P(All, ProtocolTest, ::testing::ValuesIn(all_scenarios()), test_name);

// Negative controls. All cases with few delays first: an easily caught mutant is found before any deep search.
struct Catch {
  std::string scenario;
  Exploration exploration;
  int delays = 0;
};

std::optional<Catch> hunt(const Mutant& mutant, const std::vector<Scenario>& scenarios) {
  for (int delays = 0; delays <= 2; ++delays) {
    for (const Scenario& scenario : scenarios) {
      World world(scenario);
      const Exploration found = Explorer(world, mutant.mutation).all(delays, max_schedules(scenario, delays));
      if (!found.failure.empty()) return Catch{scenario.name, found, delays};
    }
  }
  return std::nullopt;
}

TEST(MutantTest, EachIsCaught) {
  std::printf("  what is broken | first case that shows it | delays | schedules | how\n");
  const std::vector<Scenario> scenarios = all_scenarios();
  for (const Mutant& mutant : all_mutants()) {
    const std::optional<Catch> caught = hunt(mutant, scenarios);
    EXPECT_TRUE(caught) << mutant.name;
    if (!caught) continue;
    std::printf("  %s | %s | %d | %" PRId64 " | %s\n", mutant.name.c_str(), caught->scenario.c_str(), caught->delays,
                caught->exploration.num_schedules, caught->exploration.failure.c_str());
  }
}

}  // namespace
}  // namespace moe_a2a
