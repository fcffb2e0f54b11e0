// A rank leaves, stays away, or comes too late.
#include "scenarios.h"

namespace moe_a2a {

Scenario parting() {
  return {.name = "goodbye, then the heap is reused",
          .shape = {.num_topk = 2, .num_calls = 1, .routing = to_everybody(1, 2)},
          .program = [](ModelRank& rank) -> Program {
            Program program = layers(1)(rank);
            program.push_back(rank.goodbye());
            program.push_back(rank.reuse_heap());
            return program;
          }};
}

// Rank 1 stays away: the others leave, and their hosts learn the reason while the kernels run.
Scenario missing_rank() {
  return {.name = "a rank stays away",
          .shape = {.num_ranks = 3,
                    .num_topk = 2,
                    .num_experts = 3,
                    .num_calls = 2,
                    .routing = [](int rank, int) { return std::vector<std::vector<int32_t>>{{rank, (rank + 1) % 3}}; }},
          .program = [](ModelRank& rank) -> Program {
            if (rank.rank() == 1) return {};
            return {rank.dispatch_send(0), rank.dispatch_recv(0), rank.expect_left(1)};
          },
          .host = [](ModelRank& rank) -> Program {
            if (rank.rank() == 1) return {};
            return {rank.watch_report(1)};
          },
          .num_clock_jumps = 1};
}

// Rank 1 begins its second call after rank 0 has given up on it. It finds rank 0's rows, but must not take what rank
// 0's queued combine would send for sums of its own.
Scenario late_rank() {
  return {.name = "a rank comes too late",
          .shape = {.num_topk = 2, .num_calls = 2, .routing = to_everybody(1, 2)},
          .program = [](ModelRank& rank) -> Program {
            Program program = layers(1)(rank);
            if (rank.rank() == 1) program.push_back(rank.be_late());
            program.push_back(rank.dispatch_send(1));
            program.push_back(rank.dispatch_recv(1));
            if (rank.rank() == 1) program.push_back(rank.experts(1));
            program.push_back(rank.combine_send(1));
            program.push_back(rank.combine_recv(1));
            program.push_back(rank.expect_left(1));
            return program;
          },
          .num_clock_jumps = 1};
}

}  // namespace moe_a2a
