// A product that sends its rows itself.
#include "scenarios.h"

namespace moe_a2a {

// Two terms per row, so that a row may be complete in one of them only.
Scenario product_sends(int num_ranks) {
  using Choices = std::vector<std::vector<int32_t>>;
  const auto both_here = [](int rank, int) { return Choices{{2 * rank, 2 * rank + 1}}; };
  const auto everywhere = [](int, int call) { return call == 0 ? Choices{{0, 1}, {2, 3}} : Choices{{1, 2}, {-1, 0}}; };
  return {.name = num_ranks == 1 ? "a product sends its rows, one rank" : "a product sends its rows",
          .shape = {.num_ranks = num_ranks,
                    .num_max_tokens = num_ranks,
                    .num_topk = 2,
                    .num_experts = 2 * num_ranks,
                    .routing = num_ranks == 1 ? Routing(both_here) : Routing(everywhere)},
          .program = [](ModelRank& rank) {
            Program program;
            for (int call = 0; call < 2; ++call) {
              for (const Launch& launch :
                   {rank.dispatch_send(call), rank.dispatch_recv(call), rank.zero_counts(call),
                    rank.product_combine_send(call), rank.combine_recv(call), rank.check_combined(call)}) {
                program.push_back(launch);
              }
            }
            return program;
          }};
}

}  // namespace moe_a2a
