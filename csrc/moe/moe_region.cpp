#include "moe/moe_region.h"

#include <algorithm>

#include "moe/context.h"

namespace moe_a2a {

int64_t route_list_capacity(const MoeConfig& config, int expert_alignment) {
  return config.route_capacity() + static_cast<int64_t>(config.num_local_experts) * (expert_alignment - 1);
}

MoeRegion MoeRegion::take_from(RegionLayout& symmetric, RegionLayout& local, const MoeConfig& config) {
  const int64_t b = config.num_buffers, r = config.num_ranks, t = config.num_max_tokens_per_rank;
  const int64_t k = config.num_topk, experts = config.num_local_experts;
  const int64_t chunks = most_chunks(config.num_max_tokens_per_rank), ll = config.num_max_ll_tokens;
  const int64_t lists = std::max(route_list_capacity(config, kMaxExpertAlignment), experts * r * t);
  MoeRegion region;

  region.table_signal = symmetric.take<Signal>(b, r, chunks);
  region.table_route = symmetric.take<RouteEntry>(b, r, t, k);
  region.table_weight = symmetric.take<float>(b, r, t, k);
  region.table_landed_idx = symmetric.take<int32_t>(b, r, t);
  region.table_count = symmetric.take<int32_t>(b, r, chunks, experts + 1);
  region.row_signal = symmetric.take<Signal>(b, r, t);
  region.row = symmetric.take<std::byte>(b, r, t, config.max_row_stride());
  region.combine_signal = symmetric.take<Signal>(b, r, t);
  region.combine_row = symmetric.take<std::byte>(b, r, t, config.row_stride(config.dtype));
  region.ll_choices = symmetric.take<std::byte>(b, r, ll, config.ll_choices_stride());
  region.ll_row = symmetric.take<std::byte>(b, r, ll, config.ll_row_stride());
  region.ll_combine_row = symmetric.take<std::byte>(b, r, ll, config.ll_row_stride());
  region.dispatch_credit = symmetric.take<Signal>(b, r);
  region.combine_refusal = symmetric.take<Signal>(b, r);
  region.dispatch_refusal = symmetric.take<Signal>(r);

  region.epoch = local.take<uint64_t>(b);
  region.has_given_up = local.take<uint32_t>(1);
  region.is_void = local.take<uint32_t>(b);
  region.errors = local.take<ErrorCounters>(1);
  region.arrivals = local.take<uint32_t>(b, MoeRegion::kNumLaunches);
  region.tickets = local.take<uint32_t>(b, MoeRegion::kNumQueues);
  region.expert_offsets = local.take<int32_t>(b, experts + 1);
  region.expert_counts = local.take<int32_t>(b, experts);
  region.expert_row_index = local.take<int32_t>(b, lists);
  region.route_weights = local.take<float>(b, lists);
  region.route_src_rank = local.take<int32_t>(b, lists);
  region.route_src_token_idx = local.take<int32_t>(b, lists);
  region.landed_row = local.take<int32_t>(b, r * t);
  region.landed_offsets = local.take<int32_t>(b, r + 1);
  region.landed_term = local.take<RouteTerm>(b, r * t, k);
  region.combine_order = local.take<int32_t>(b, MoeRegion::kNumOrders, r * t);
  region.num_recv_tokens_per_rank = local.take<int32_t>(b, r);
  region.sums_return_ll = local.take<int32_t>(b);
  region.token_ranks = local.take<RankSet>(b, t);
  return region;
}

RegionSize place_region(Context& context, std::byte* symmetric_base, std::byte* local_base) {
  const MoeConfig& config = context.config;
  return place_client(
      context, config.num_ranks, config.num_buffers + 1, symmetric_base, local_base,
      [&](auto& symmetric, auto& local) { context.region = MoeRegion::take_from(symmetric, local, config); });
}

}  // namespace moe_a2a
