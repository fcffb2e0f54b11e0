// Variants of scenarios that use LL words.
#pragma once

#include <string>
#include <utility>

#include "protocol/scenarios.h"

namespace moe_a2a {

// Every word is an operation, so schedules are long.
inline constexpr int kLlDivisor = 4;

// The same scenario of small batches whose sums return as rows.
inline Scenario with_row_sums(Scenario scenario) {
  scenario.name += ", sums as rows";
  scenario.shape.max_ll_sum_tokens = 0;
  return scenario;
}

// The same scenario with LL words for all batches.
inline Scenario as_small(Scenario scenario) {
  scenario.name = "LL: " + scenario.name;
  scenario.shape.num_max_ll_tokens = scenario.shape.num_max_tokens;
  scenario.shape.hidden = 1;
  scenario.schedule_divisor = kLlDivisor;
  return scenario;
}

// The same scenario with choices as LL words, and rows as signalled rows.
inline Scenario as_medium(Scenario scenario) {
  const std::string name = "medium batches: " + scenario.name;
  scenario = as_small(std::move(scenario));
  scenario.name = name;
  scenario.shape.max_ll_row_tokens = scenario.shape.max_ll_sum_tokens = 0;
  return scenario;
}

}  // namespace moe_a2a
