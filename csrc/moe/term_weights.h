// On request, before a combine, for callers that learn the weights only then: the dispatch has carried the number of
// each choice in place of its weight.
#pragma once

#include "moe/args.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

struct TermWeights {
  using Args = TermWeightsArgs;
  static constexpr const char* kName = "term_weights";

  // One thread per landed row and term.
  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte*) {
    const MoeConfig& config = args.context.config;
    const MoeRegion& region = args.context.region;
    const int num_topk = config.num_topk;
    const int64_t end = int64_t{region.landed_offsets(args.buffer, config.num_ranks)} * num_topk;
    const int64_t stride = int64_t{grid.size()} * block.size();
    for (int64_t i = int64_t{grid.rank()} * block.size() + block.rank(); i < end; i += stride) {
      const int64_t at = i / num_topk;
      const int row = region.landed_row(args.buffer, at);
      RouteTerm& term = region.landed_term(args.buffer, row, i - at * num_topk);
      const float choice = term.weight;
      // Past a row's last term, the contents are unspecified.
      if (choice >= 0 && choice < num_topk) {
        term.weight = args.weights[int64_t{row} * num_topk + static_cast<int>(choice)];
      }
    }
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
