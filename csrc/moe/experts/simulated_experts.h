// On request, between dispatch and combine: the sums of simulated experts. Each landed row is read once and written
// once, and the host needs no count.
#pragma once

#include "comm/work_queue.h"
#include "moe/experts/simulated_sum.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

struct SimulatedExperts {
  using Args = SimulatedExpertsArgs;
  static constexpr const char* kName = "simulated_experts";

  // One warp per piece of a landed row: a small batch has few rows.
  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte*) {
    const Context& c = args.context;
    const RowLayout layout = c.config.row(c.config.dtype);
    const int num_pieces = layout.num_pieces();
    RoundRobin<> turns = make_round_robin(grid, block.warp_rank(), block.num_warps());
    turns.walk(num_landed(args) * num_pieces, [&](int unit) {
      const int row = c.region.landed_row(args.buffer, unit / num_pieces);
      if (row < 0 || row >= c.config.row_capacity()) return true;
      const Piece piece = layout.piece(unit % num_pieces);
      with_element_type(layout.dtype, [&](auto type) {
        using T = decltype(type);
        T* target = reinterpret_cast<T*>(args.sums) + int64_t{row} * c.config.hidden + piece.first;
        const SimulatedSum<T> sum(c, args.buffer, args.layout, args.scales, row);
        sum.store(block.warp(), piece, args.vector_rows, target);
      });
      return true;
    });
  }

 private:
  // The caller holds views of the lists and may have overwritten them. So counts, rows and experts are clamped.
  MOE_A2A_DEVICE static int num_landed(const Args& args) {
    const MoeConfig& config = args.context.config;
    const int64_t listed = args.context.region.landed_offsets(args.buffer, config.num_ranks);
    return static_cast<int>(listed < config.row_capacity() ? listed : config.row_capacity());
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
