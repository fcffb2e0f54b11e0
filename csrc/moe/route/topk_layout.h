// Where tokens will go, before any dispatch: counts by rank and expert, for libraries whose dispatch takes them.
#pragma once

#include "comm/rank_set.h"
#include "moe/route/run_topk_layout.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

struct TopkLayout {
  using Args = TopkLayoutArgs;
  static constexpr const char* kName = "topk_layout";

  // One thread per token.
  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte*) {
    const int stride = grid.size() * block.size();
    for (int t = grid.rank() * block.size() + block.rank(); t < args.num_tokens; t += stride) {
      const RankSet ranks = count_choices(args, t);
      for (int r = 0; r < args.num_ranks; ++r) {
        args.is_token_in_rank[int64_t{t} * args.num_ranks + r] = ranks.contains(r);
        if (ranks.contains(r)) count(args.counts + r);
      }
    }
  }

 private:
  // Returns the ranks of the token's experts.
  MOE_A2A_DEVICE static RankSet count_choices(const Args& args, int token) {
    const int num_local = args.num_experts / args.num_ranks;
    RankSet ranks;
    for (int k = 0; k < args.num_topk; ++k) {
      const int64_t expert = args.topk_idx[int64_t{token} * args.num_topk + k];
      if (expert < 0 || expert >= args.num_experts) continue;
      count(args.counts + args.num_ranks + expert);
      ranks.insert(static_cast<int>(expert) / num_local);
    }
    return ranks;
  }
  MOE_A2A_DEVICE static void count(int32_t* counter) { atomic_add<Order::kRelaxed, Scope::kDevice>(counter, 1); }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
