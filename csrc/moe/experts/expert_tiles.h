// The tiles of all experts as one sequence, derived from expert_offsets on the device.
#pragma once

#include "arch/arch.h"
#include "moe/experts/grouped_gemm_args.h"
#include "moe/experts/tile_order.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// A warp's forward-only cursor over the tiles. Each lane holds one expert of the current window. Order: SingleTiles or
// PairedTiles.
template <class Order, int kTileRows, int kTileColumns>
class ExpertTiles {
 public:
  // The current tile.
  int expert, first_position, num_positions, column_tile;
  bool shares_columns;

  MOE_A2A_DEVICE ExpertTiles(const GroupedGemmArgs& args, const Warp& warp) : args_(args), warp_(warp) { load(); }

  // Moves to `block`'s tile of unit `unit`; false past the last unit.
  MOE_A2A_DEVICE bool seek(int unit, int block = 0) {
    for (;;) {
      const int behind = warp_.count(num_before_ + num_until_ <= unit);  // experts whose tiles all come earlier
      if (behind < warp_.size()) {
        const int until_previous = warp_.broadcast(num_until_, behind > 0 ? behind - 1 : 0);
        place(unit - num_before_ - (behind > 0 ? until_previous : 0), behind, block);
        return true;
      }
      num_before_ += warp_.last(num_until_);
      base_ += warp_.size();
      if (base_ >= args_.num_experts) return false;
      load();
    }
  }

 private:
  MOE_A2A_DEVICE int column_tiles() const { return div_up(args_.num_columns, kTileColumns); }

  // Clamped: offsets that no dispatch has written must not lead past the tensors.
  MOE_A2A_DEVICE void load() {
    const int e = base_ + warp_.rank();
    begin_ = end_ = 0;
    if (e < args_.num_experts) {
      begin_ = clamp(args_.expert_offsets[e], 0);
      end_ = clamp(args_.expert_offsets[e + 1], begin_);
    }
    num_until_ = warp_.inclusive_sum(Order::num_units(div_up(end_ - begin_, kTileRows), column_tiles()));
  }
  MOE_A2A_DEVICE int clamp(int offset, int least) const {
    return offset < least ? least : offset > args_.num_rows ? args_.num_rows : offset;
  }

  MOE_A2A_DEVICE void place(int unit, int lane, int block) {
    const int begin = warp_.broadcast(begin_, lane), end = warp_.broadcast(end_, lane);
    const ExpertTile tile = Order::tile(unit, div_up(end - begin, kTileRows), column_tiles(), block);
    expert = base_ + lane;
    first_position = begin + tile.row_tile * kTileRows;
    num_positions = end - first_position < kTileRows ? end - first_position : kTileRows;
    column_tile = tile.column_tile;
    shares_columns = tile.shares_columns;
  }

  const GroupedGemmArgs& args_;
  Warp warp_;
  int base_ = 0, num_before_ = 0;  // first expert of the window; units of all experts before it
  int begin_, end_, num_until_;    // of the lane's expert: its positions; units of the window up to its end
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
