// The small cases that the explorer runs, and the mutants that it must catch.
#pragma once

#include <string>
#include <vector>

#include "world.h"

namespace moe_a2a {

std::vector<Scenario> all_scenarios();

// Some of them.
Scenario product_sends(int num_ranks);
Scenario parting();
Scenario missing_rank();
Scenario late_rank();

struct Mutant {
  std::string name;
  Mutation mutation;
};
std::vector<Mutant> all_mutants();

}  // namespace moe_a2a
