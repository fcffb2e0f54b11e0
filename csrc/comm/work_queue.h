// How the units of a launch's work are shared among its workers: threads, warps or blocks.
#pragma once

#include <cstdint>

#include "arch/arch.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// Round-robin over units in several consecutive segments: the worker takes every stride-th of all units.
// `Unit` is an integer type that holds a segment's number of units plus the stride.
template <class Unit = int>
class RoundRobin {
 public:
  MOE_A2A_DEVICE RoundRobin(Unit first, int stride) : next_(first), stride_(stride) {}

  // This worker's next unit, if the segment has as many.
  MOE_A2A_DEVICE Unit next() const { return next_; }

  // Calls visit(unit) for this worker's units of the next segment; stops with false as soon as a visit returns false.
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

// Whether this block is one of `grid`, a subset of the launch's blocks.
MOE_A2A_DEVICE bool has_part_in(const Grid& grid) { return grid.rank() >= 0 && grid.rank() < grid.size(); }

// Worker w of block b takes unit w * num_blocks + b: neighbouring units go to different blocks.
MOE_A2A_DEVICE RoundRobin<> make_round_robin(const Grid& grid, int worker, int num_workers) {
  return {grid.rank() + grid.size() * worker, grid.size() * num_workers};
}

// Each free warp takes the next unit. The blocks of a GPU do not reach a peer equally fast: with equal shares, some
// finish halfway through and leave the link idle (20 % of combine on H200). Results do not depend on which warp takes a
// unit. On the CPU, where blocks are threads, units go round-robin.
class WorkQueue {
 public:
  // `ticket`: counts the units drawn; 0 at the start of the launch. Each warp's first unit is fixed, unless blocks join
  // late: no other warp could take the unit of a block that has not joined.
  MOE_A2A_DEVICE WorkQueue(const Grid& grid, const Block& block, int num_warps, uint32_t* ticket,
                           bool blocks_join_late = false)
      : warp_(block.warp()),
        ticket_(ticket),
        draws_first_(kBlocksAreUnequal && blocks_join_late),
        num_first_(draws_first_ ? 0 : grid.size() * num_warps),
        unit_(grid.rank() + grid.size() * block.warp_rank()) {}

  // Calls visit(unit) for this warp's units. The next ticket is drawn before each visit, so that its latency is hidden.
  template <class Visit>
  MOE_A2A_DEVICE void walk(int num_units, const Visit& visit) {
    draw();
    if (draws_first_) advance();
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
      unit_ = num_first_ + warp_.broadcast(drawn_);
      draw();
    } else {
      unit_ += num_first_;
    }
  }

  Warp warp_;
  uint32_t* ticket_;
  bool draws_first_;
  int num_first_;  // units that are not drawn: one per warp, or none
  int unit_, drawn_ = 0;
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
