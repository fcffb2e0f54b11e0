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

// 12345 -> "12,345".
inline std::string with_commas(int64_t n) {
  std::string digits = std::to_string(n);
  for (int i = static_cast<int>(digits.size()) - 3; i > 0; i -= 3) digits.insert(i, 1, ',');
  return digits;
}

// A case's row in docs/protocol_tests.md: its numbers of schedules.
template <class World, class Case, class Most>
std::string explored_row(const Case& explored, int max_delays, const Most& most, bool by_fence) {
  std::string row = std::string("| ") + explored.name + " |";
  bool complete = true;
  for (int bound = 0; bound <= max_delays; ++bound) {
    if (complete) {
      World world(explored);
      const Exploration found = Explorer(world, {.signals_by_fence = by_fence}).all(bound, most(explored, bound));
      EXPECT_EQ(found.failure, "") << found.trace;
      complete = found.complete;
      row += std::string(" ") + with_commas(found.num_schedules) + (complete ? " |" : "+ |");
    } else {
      row += "  |";  // a larger bound starts with the same schedules
    }
  }
  return row;
}

// With release stores, as on the CPU, and with one fence before relaxed stores, as on the GPUs. Prints and returns the
// case's row.
template <class World, class Case, class Most>
std::string expect_holds(const Case& explored, int max_delays, const Most& most) {
  const std::string row = explored_row<World>(explored, max_delays, most, false);
  const std::string by_fence = explored_row<World>(explored, 1, most, true);
  EXPECT_TRUE(row.starts_with(by_fence)) << "The fence changes the numbers:\n" << row << "\n" << by_fence;
  std::printf("%s\n", row.c_str());
  return row;
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

// Prints and returns the mutants' rows in docs/protocol_tests.md.
template <class World, class Case, class Most>
std::vector<std::string> expect_each_is_caught(const std::vector<Mutant>& mutants, const std::vector<Case>& cases,
                                               const Most& most) {
  std::vector<std::string> rows;
  for (const Mutant& mutant : mutants) {
    const std::optional<Catch> caught = hunt<World>(mutant, cases, most);
    EXPECT_TRUE(caught) << mutant.name;
    if (!caught) continue;
    rows.push_back(std::string("| ") + mutant.name + " | " + caught->name + " | " + std::to_string(caught->delays) +
                   " | " + with_commas(caught->exploration.num_schedules) + " |");
    std::printf("%s\n  %s\n", rows.back().c_str(), caught->exploration.failure.c_str());
  }
  return rows;
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
