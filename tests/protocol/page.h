// The tables of docs/protocol_tests.md must show what the explorer finds.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <set>
#include <string>

namespace moe_a2a {

inline constexpr char kHowToUpdateThePage[] =
    "\nTo update the tables of docs/protocol_tests.md, paste what this prints, the mutants, then the cases:\n  "
    "build/tests/tests/protocol_tests "
    "--gtest_filter='*/ProtocolTest.HoldsInEverySchedule/*:MutantTest.*' | grep '^| '";

// The lines of the page that are rows of a table, read once.
inline const std::set<std::string>& rows_of_page() {
  static const std::set<std::string> all = [] {
    std::ifstream page(MOE_A2A_PROTOCOL_PAGE);
    std::set<std::string> rows;
    for (std::string line; std::getline(page, line);) {
      if (line.starts_with("| ")) rows.insert(line);
    }
    return rows;
  }();
  return all;
}

inline void expect_on_page(const std::string& row) {
  // Only in CI: another compiler may order loads otherwise, which changes the numbers.
  if (std::getenv("CI") == nullptr || std::getenv("MOE_A2A_SCHEDULES") != nullptr) return;
  if (!rows_of_page().contains(row)) ADD_FAILURE() << "The page lacks this row:\n" << row << kHowToUpdateThePage;
}

// Rows of cases and mutants that were renamed or removed.
inline void expect_no_other_names_on_page(const std::set<std::string>& names) {
  for (const std::string& row : rows_of_page()) {
    const std::string name = row.substr(2, row.find(" |", 2) - 2);
    if (!names.contains(name)) ADD_FAILURE() << "No case or mutant has this name:\n" << row << kHowToUpdateThePage;
  }
}

}  // namespace moe_a2a
