// Who does which unit of a launch's work: rows, one after the other, by the warps that send.
#pragma once

#include "moe/args.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// The blocks of a GPU are not equally fast on the way to another one: shared out evenly, some end when half the time is
// over and leave the link to the others (H200: 20 % of combine). So whoever is free takes the next unit; which unit
// goes where is not touched by it. Where blocks are threads of the CPU they take turns.
class Units {
 public:
  // `ticket`: the next unit to be handed out behind everybody's first; 0 at the start of the launch.
  MOE_A2A_DEVICE Units(const Grid& grid, const Block& block, int num_warps, uint32_t* ticket)
      : warp_(block.warp()),
        ticket_(ticket),
        stride_(grid.size() * num_warps),
        unit_(grid.rank() + grid.size() * block.warp_rank()) {
    take();
  }

  MOE_A2A_DEVICE int current() const { return unit_; }

  // What was asked for a unit ago has come by now.
  MOE_A2A_DEVICE void advance() {
    if constexpr (kBlocksAreUnequal) {
      unit_ = stride_ + warp_.broadcast(taken_);
      take();
    } else {
      unit_ += stride_;
    }
  }

 private:
  MOE_A2A_DEVICE void take() {
    if constexpr (kBlocksAreUnequal) {
      if (warp_.rank() == 0) taken_ = static_cast<int>(atomic_add<Order::kRelaxed, Scope::kDevice>(ticket_, 1u));
    }
  }

  Warp warp_;
  uint32_t* ticket_;
  int stride_, unit_;
  int taken_ = 0;
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
