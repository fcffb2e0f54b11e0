// How the units of a launch's work are shared out among its workers: threads, warps or blocks.
#pragma once

#include <cstdint>

#include "arch/arch.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// Round-robin over units that lie in several segments, one behind the other: of the whole line the worker takes every
// stride-th unit. Unit is an integer that holds a segment's number of units plus the stride.
template <class Unit = int>
class Line {
 public:
  MOE_A2A_DEVICE Line(Unit first, int stride) : next_(first), stride_(stride) {}

  // Calls visit(unit) for this worker's units of the next segment; false as soon as a visit returns false.
  template <class Visit>
  MOE_A2A_DEVICE bool walk(Unit num_units, const Visit& visit) {
    MOE_A2A_ROLLED
    for (; next_ < num_units; next_ += stride_) {
      if (!visit(next_)) return false;
    }
    next_ -= num_units;
    return true;
  }

 private:
  Unit next_;
  int stride_;
};

// Whether this block belongs to a part of the launch's blocks.
MOE_A2A_DEVICE bool has_part_in(const Grid& grid) { return grid.rank() >= 0 && grid.rank() < grid.size(); }

// Worker w of a block takes unit w * num_blocks + block: neighbouring units go to different blocks.
MOE_A2A_DEVICE Line<> make_line(const Grid& grid, int worker, int num_workers) {
  return {grid.rank() + grid.size() * worker, grid.size() * num_workers};
}

// Units go to whichever warp is free. The blocks of a GPU do not reach a peer equally fast: with equal shares, some
// finish halfway through and leave the link idle (20 % of combine on H200). Which unit is sent where does not depend on
// it. On the CPU, where blocks are threads, the units go round-robin.
class WorkQueue {
 public:
  // `ticket`: the next unit to hand out after everyone's first; 0 at the start of the launch.
  MOE_A2A_DEVICE WorkQueue(const Grid& grid, const Block& block, int num_warps, uint32_t* ticket)
      : warp_(block.warp()),
        ticket_(ticket),
        stride_(grid.size() * num_warps),
        unit_(grid.rank() + grid.size() * block.warp_rank()) {}

  // Calls visit(unit) for this warp's units. The next ticket is drawn before the visit, so that it has arrived by its
  // end.
  template <class Visit>
  MOE_A2A_DEVICE void walk(int num_units, const Visit& visit) {
    draw();
    while (unit_ < num_units) {
      visit(unit_);
      advance();
    }
  }

 private:
  MOE_A2A_DEVICE void draw() {
    if constexpr (kBlocksAreUnequal) {
      if (warp_.rank() == 0) drawn_ = static_cast<int>(atomic_add<Order::kRelaxed, Scope::kDevice>(ticket_, 1u));
    }
  }
  MOE_A2A_DEVICE void advance() {
    if constexpr (kBlocksAreUnequal) {
      unit_ = stride_ + warp_.broadcast(drawn_);
      draw();
    } else {
      unit_ += stride_;
    }
  }

  Warp warp_;
  uint32_t* ticket_;
  int stride_, unit_;
  int drawn_ = 0;
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
