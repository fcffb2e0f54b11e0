#include "moe/moe_region.h"

#include <algorithm>

#include "moe/context.h"

namespace moe_a2a {
int64_t route_list_capacity(const MoeConfig& config, int expert_alignment) {
  return config.route_capacity() + static_cast<int64_t>(config.num_local_experts()) * (expert_alignment - 1);
}

MoeRegion make_moe_region(const MoeConfig& config, RegionLayout& symmetric, RegionLayout& local) {
  const int64_t b = config.num_buffers, r = config.num_ranks, t = config.num_max_tokens_per_rank;
  const int64_t k = config.num_topk, experts = config.num_local_experts();
  const int64_t chunks = most_chunks(config.num_max_tokens_per_rank), ll = config.num_max_ll_tokens;
  const int64_t lists = std::max(route_list_capacity(config, kMaxExpertAlignment), experts * r * t);
  MoeRegion w;

  w.table_signal = symmetric.take<Signal>(b, r, chunks);
  w.table_route = symmetric.take<RouteEntry>(b, r, t, k);
  w.table_weight = symmetric.take<float>(b, r, t, k);
  w.table_landed_idx = symmetric.take<int32_t>(b, r, t);
  w.table_count = symmetric.take<int32_t>(b, r, chunks, experts + 1);
  w.row_signal = symmetric.take<Signal>(b, r, t);
  w.row = symmetric.take<std::byte>(b, r, t, config.max_row_stride());
  w.combine_signal = symmetric.take<Signal>(b, r, t);
  w.combine_row = symmetric.take<std::byte>(b, r, t, config.row_stride(config.dtype));
  w.ll_choices = symmetric.take<std::byte>(b, r, ll, config.ll_choices_stride());
  w.ll_row = symmetric.take<std::byte>(b, r, ll, config.ll_row_stride());
  w.ll_combine_row = symmetric.take<std::byte>(b, r, ll, config.ll_row_stride());
  w.dispatch_credit = symmetric.take<Signal>(b, r);
  w.combine_refusal = symmetric.take<Signal>(b, r);
  w.dispatch_refusal = symmetric.take<Signal>(r);

  w.epoch = local.take<uint64_t>(b);
  w.errors = local.take<ErrorCounters>(1);
  w.arrivals = local.take<uint32_t>(b, MoeRegion::kNumLaunches);
  w.tickets = local.take<uint32_t>(b, MoeRegion::kNumLaunches);
  w.expert_offsets = local.take<int32_t>(b, experts + 1);
  w.expert_counts = local.take<int32_t>(b, experts);
  w.expert_row_index = local.take<int32_t>(b, lists);
  w.route_weight = local.take<float>(b, lists);
  w.route_src_rank = local.take<int32_t>(b, lists);
  w.route_src_token = local.take<int32_t>(b, lists);
  w.landed_row = local.take<int32_t>(b, r * t);
  w.landed_offsets = local.take<int32_t>(b, r + 1);
  w.landed_term = local.take<RouteTerm>(b, r * t, k);
  w.combine_order = local.take<int32_t>(b, MoeRegion::kNumOrders, r * t);
  w.num_recv_tokens = local.take<int32_t>(b, r);
  w.sums_return_ll = local.take<int32_t>(b, 1);
  w.token_ranks = local.take<RankSet>(b, t);
  return w;
}

RegionSize place_region(Context& context, std::byte* symmetric_base, std::byte* local_base) {
  const MoeConfig& config = context.config;
  return place_client(context, config.num_ranks, config.num_buffers + 1, symmetric_base, local_base,
                      [&](RegionLayout& symmetric, RegionLayout& local) {
                        context.region = make_moe_region(config, symmetric, local);
                      });
}

}  // namespace moe_a2a
