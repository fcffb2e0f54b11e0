// How the tests explore the cases of either model. `most`(case, delays): schedules of a search.
#pragma once

#include <gtest/gtest.h>

#include <cctype>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "explorer.h"

namespace moe_a2a {

struct Mutant {
  std::string name;
  Mutation mutation;
};

// MOE_A2A_SCHEDULES=1000000 searches deeper.
inline int64_t schedules_or(int64_t most) {
  const char* asked = std::getenv("MOE_A2A_SCHEDULES");
  return asked != nullptr ? std::atoll(asked) : most;
}

// With release stores, as on the CPU, and with one fence before relaxed stores, as on the GPUs.
template <class World, class Case, class Most>
void expect_holds(const Case& explored, int max_delays, const Most& most) {
  for (const bool by_fence : {false, true}) {
    std::printf("  %-40s %-8s", explored.name.c_str(), by_fence ? "fence" : "release");
    for (int bound = 0; bound <= (by_fence ? 1 : max_delays); ++bound) {
      World world(explored);
      const Exploration found = Explorer(world, {.signals_by_fence = by_fence}).all(bound, most(explored, bound));
      std::printf(" %6" PRId64 "%s", found.num_schedules, found.complete ? " " : "+");
      ASSERT_EQ(found.failure, "") << found.trace;
      if (!found.complete) break;  // a larger bound starts with the same schedules
    }
    std::printf("\n");
  }
}

// The case that shows a mutant. All cases with few delays first: an easily caught mutant is found before any deep
// search.
struct Catch {
  std::string name;
  Exploration exploration;
  int delays = 0;
};

template <class World, class Case, class Most>
std::optional<Catch> hunt(const Mutant& mutant, const std::vector<Case>& cases, const Most& most) {
  for (int delays = 0; delays <= 2; ++delays) {
    for (const Case& explored : cases) {
      World world(explored);
      const Exploration found = Explorer(world, mutant.mutation).all(delays, most(explored, delays));
      if (!found.failure.empty()) return Catch{explored.name, found, delays};
    }
  }
  return std::nullopt;
}

template <class World, class Case, class Most>
void expect_each_is_caught(const std::vector<Mutant>& mutants, const std::vector<Case>& cases, const Most& most) {
  std::printf("  what is broken | first case that shows it | delays | schedules | how\n");
  for (const Mutant& mutant : mutants) {
    const std::optional<Catch> caught = hunt<World>(mutant, cases, most);
    EXPECT_TRUE(caught) << mutant.name;
    if (!caught) continue;
    std::printf("  %s | %s | %d | %" PRId64 " | %s\n", mutant.name.c_str(), caught->name.c_str(), caught->delays,
                caught->exploration.num_schedules, caught->exploration.failure.c_str());
  }
}

// A case's name as GoogleTest allows it.
template <class Case>
std::string test_name(const ::testing::TestParamInfo<Case>& info) {
  std::string name = info.param.name;
  std::erase(name, ',');
  for (char& letter : name) letter = std::isalnum(static_cast<unsigned char>(letter)) ? letter : '_';
  return name;
}

}  // namespace moe_a2a
