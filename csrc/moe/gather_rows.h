// On request, between steps 2 and 3: copies rows so that each expert's are contiguous, for callers whose GEMM does not
// gather. Costs a copy.
#pragma once

#include "comm/work_queue.h"
#include "moe/args.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

struct GatherRows {
  using Args = GatherRowsArgs;
  static constexpr const char* kName = "gather_rows";

  // One warp per position, over the filled positions of all experts.
  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte*) {
    const MoeRegion& region = args.context.region;
    RoundRobin<int64_t> turns(grid.rank() + grid.size() * block.warp_rank(), grid.size() * block.num_warps());
    for (int e = 0; e < args.context.config.num_local_experts; ++e) {
      const int64_t start = region.expert_offsets(args.buffer, e);
      turns.walk(num_filled(args, e, start), [&](int64_t i) {
        gather(args, block.warp(), start + i);
        return true;
      });
    }
  }

  // The caller holds views of the lists and may have overwritten them. So positions are clamped to expert_x, rows to
  // recv_x.
  MOE_A2A_DEVICE static int64_t num_filled(const Args& args, int expert, int64_t start) {
    const MoeRegion& region = args.context.region;
    const int64_t listed = args.layout == Layout::kMasked ? region.expert_counts(args.buffer, expert)
                                                          : region.expert_offsets(args.buffer, expert + 1) - start;
    const int64_t room = start < 0 ? 0 : args.num_positions - start, filled = listed < room ? listed : room;
    return filled > 0 ? filled : 0;
  }

  MOE_A2A_DEVICE static void gather(const Args& args, const Warp& warp, int64_t position) {
    const Context& c = args.context;
    const int32_t row = c.region.expert_row_index(args.buffer, position);
    const int64_t bytes = static_cast<int64_t>(c.config.hidden) * size_of(args.row_dtype);
    const int64_t scale_bytes = args.row_dtype == DType::kFloat8 ? c.config.num_scales() * int64_t{4} : 0;
    std::byte* target = args.expert_x + position * bytes;
    std::byte* scales = reinterpret_cast<std::byte*>(args.expert_x_scales) + position * scale_bytes;
    if (row < 0 || row >= c.config.row_capacity()) {
      fill_zero(warp, target, bytes);
      fill_zero(warp, scales, scale_bytes);
      return;
    }
    const uint64_t start = trace_now();
    const int src_rank = row / c.config.num_max_tokens_per_rank, token = row % c.config.num_max_tokens_per_rank;
    const std::byte* source = c.region.row.at(args.buffer, src_rank, token);
    multicast_bytes(warp, RankSet::only(0), 0, [&](int) { return target; }, source, bytes);
    if (scale_bytes > 0) {
      multicast_bytes(
          warp, RankSet::only(0), 0, [&](int) { return scales; }, source + c.config.scales_offset(), scale_bytes);
    }
    record(c.trace(), warp, {.kind = moe_kind::kGather, .begin = start, .peer = src_rank, .token = token});
  }

  MOE_A2A_DEVICE static void fill_zero(const Warp& warp, std::byte* target, int64_t bytes) {
    for (int64_t i = warp.rank(); i < bytes; i += warp.size()) target[i] = std::byte{0};
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
