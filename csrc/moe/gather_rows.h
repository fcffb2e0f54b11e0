// On request, between steps 2 and 3: copies rows so that each expert's are contiguous, for callers whose GEMM does not
// gather; or, in Layout::kRows, each landed row to its own place, for callers who want rows without gaps between them.
#pragma once

#include "comm/work_queue.h"
#include "moe/args.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

struct GatherRows {
  using Args = GatherRowsArgs;
  static constexpr const char* kName = "gather_rows";

  // One warp per row.
  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte*) {
    RoundRobin<int64_t> turns(grid.rank() + grid.size() * block.warp_rank(), grid.size() * block.num_warps());
    args.layout == Layout::kRows ? copy_landed(args, block.warp(), turns) : copy_by_expert(args, block.warp(), turns);
  }

 private:
  MOE_A2A_DEVICE static void copy_landed(const Args& args, const Warp& warp, RoundRobin<int64_t>& turns) {
    const Context& c = args.context;
    turns.walk(c.region.landed_offsets(args.buffer, c.config.num_ranks), [&](int64_t i) {
      const int row = c.region.landed_row(args.buffer, i);
      copy(args, warp, row, row);
      return true;
    });
  }

  // Over the filled positions of all experts. Each lane loads the bounds of one expert: loaded in turn, those of 64
  // experts would take longer than the copies of a small batch.
  MOE_A2A_DEVICE static void copy_by_expert(const Args& args, const Warp& warp, RoundRobin<int64_t>& turns) {
    const int num_experts = args.context.config.num_local_experts;
    for (int first = 0; first < num_experts; first += warp.size()) {
      const int own = first + warp.rank();
      const Filled bounds = own < num_experts ? filled(args, own) : Filled{};
      for (int lane = 0; lane < warp.size() && first + lane < num_experts; ++lane) {
        const int64_t start = warp.broadcast(bounds.start, lane);
        turns.walk(warp.broadcast(bounds.count, lane), [&](int64_t i) {
          copy(args, warp, args.context.region.expert_row_index(args.buffer, start + i), start + i);
          return true;
        });
      }
    }
  }

  struct Filled {
    int64_t start = 0, count = 0;
  };
  // The caller holds views of the lists and may have overwritten them. So positions are clamped to expert_x, rows to
  // recv_x.
  MOE_A2A_DEVICE static Filled filled(const Args& args, int expert) {
    const MoeRegion& region = args.context.region;
    const int64_t start = region.expert_offsets(args.buffer, expert);
    const int64_t listed = args.layout == Layout::kMasked ? region.expert_counts(args.buffer, expert)
                                                          : region.expert_offsets(args.buffer, expert + 1) - start;
    const int64_t room = start < 0 ? 0 : args.num_positions - start, count = listed < room ? listed : room;
    return {start, count > 0 ? count : 0};
  }

  // Zeros if there is no such row.
  MOE_A2A_DEVICE static void copy(const Args& args, const Warp& warp, int32_t row, int64_t position) {
    const Context& c = args.context;
    const int64_t bytes = static_cast<int64_t>(c.config.hidden) * size_of(args.row_dtype);
    const int num_scales = args.row_dtype == DType::kFloat8 ? c.config.num_scales() : 0;
    std::byte* target = args.expert_x + position * bytes;
    if (row < 0 || row >= c.config.row_capacity()) {
      for (int64_t i = warp.rank(); i < bytes; i += warp.size()) target[i] = std::byte{0};
      for (int i = warp.rank(); i < num_scales; i += warp.size()) *scale(args, position, i) = 0.0F;
      return;
    }
    const uint64_t start = trace_now();
    const int src_rank = row / c.config.num_max_tokens_per_rank, token = row % c.config.num_max_tokens_per_rank;
    const std::byte* source = c.region.row.at(args.buffer, src_rank, token);
    multicast_bytes(warp, RankSet::only(0), 0, [&](int) { return target; }, source, bytes);
    const auto* scales = reinterpret_cast<const float*>(source + c.config.scales_offset());
    for (int i = warp.rank(); i < num_scales; i += warp.size()) *scale(args, position, i) = scales[i];
    record(c.trace(), warp, {.kind = moe_kind::kGather, .begin = start, .peer = src_rank, .token = token});
  }

  MOE_A2A_DEVICE static float* scale(const Args& args, int64_t position, int i) {
    const int64_t num_scales = args.context.config.num_scales();
    if (!args.scales_by_column) return args.expert_x_scales + position * num_scales + i;
    const int64_t num_rows = args.context.config.row_capacity(), expert = position / num_rows;
    return args.expert_x_scales + (expert * num_scales + i) * num_rows + position % num_rows;
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
