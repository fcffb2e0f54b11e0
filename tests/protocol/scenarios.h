// The small cases that the explorer runs, and the mutants that it must catch.
#pragma once

#include <vector>

#include "explore.h"
#include "world.h"

namespace moe_a2a {

std::vector<Scenario> all_scenarios();

// Every token goes to one expert of every rank.
Routing to_everybody(int num_tokens, int num_ranks);
// Calls 0 ... n-1, each dispatched and combined before the next.
std::function<Program(ModelRank&)> layers(int n);

// Some of the scenarios.
Scenario product_sends(int num_ranks);
Scenario parting();
Scenario missing_rank();
Scenario late_rank();
Scenario refused_dispatch();
Scenario other_rows(bool queues_combine);
Scenario other_bound(bool queues_combine);
Scenario refused_combine();
Scenario abandoned_combine();
Scenario refused_twice();

std::vector<Mutant> all_mutants();

}  // namespace moe_a2a
