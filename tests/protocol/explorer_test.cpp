// The protocol in every small case, in every schedule within a bound. Then each of its parts is broken in turn, and
// some case must catch it. docs/protocol_tests.md shows the printed rows.
#include "explore.h"
#include "page.h"
#include "scenarios.h"
#include "seed.h"

namespace moe_a2a {
namespace {

constexpr int kMaxDelays = 3;
constexpr int64_t kRandomSchedules = 5'000;

// Enough for all schedules with two delays of the smaller cases; those with three are millions.
int64_t max_schedules(const Scenario& scenario, int delays) {
  return schedules_or(delays < kMaxDelays ? 20'000 : 10'000) / scenario.schedule_divisor;
}

class ProtocolTest : public ::testing::TestWithParam<Scenario> {};

TEST_P(ProtocolTest, HoldsInEverySchedule) {
  const std::string row = expect_holds<World>(GetParam(), kMaxDelays, max_schedules);
  if (!HasFailure()) expect_on_page(row);
}

TEST_P(ProtocolTest, HoldsInRandomSchedules) {
  const uint64_t seed = test_seed();
  World world(GetParam());
  const Exploration found = Explorer(world, {}).random(seed, kRandomSchedules / GetParam().schedule_divisor);
  EXPECT_EQ(found.failure, "");
}

INSTANTIATE_TEST_SUITE_P(All, ProtocolTest, ::testing::ValuesIn(all_scenarios()), test_name<Scenario>);

// Negative controls.
TEST(MutantTest, EachIsCaught) {
  for (const std::string& row : expect_each_is_caught<World>(all_mutants(), all_scenarios(), max_schedules)) {
    expect_on_page(row);
  }
}

TEST(PageTest, HasNoOtherRows) {
  std::set<std::string> names = {"case", "what is broken"};  // the headings
  for (const Scenario& scenario : all_scenarios()) names.insert(scenario.name);
  for (const Mutant& mutant : all_mutants()) names.insert(mutant.name);
  expect_no_other_names_on_page(names);
}

}  // namespace
}  // namespace moe_a2a
