// Which block of a launch is the last: it speaks for all of them.
#pragma once

#include "arch/arch.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// Counts a block, by one thread of it behind a barrier of the block; true for the last one. Everything that all blocks
// read and wrote before comes before what that thread does next: the barrier brings a block's own work together, the
// acq_rel count brings the blocks together. The last one resets the count, which nobody reads again before the next
// launch that counts there.
MOE_A2A_DEVICE bool count_block(const Grid& grid, uint32_t* arrivals) {
  const uint32_t before = atomic_add<Order::kAcqRel, Scope::kDevice>(arrivals, 1u);
  if (before + 1 != static_cast<uint32_t>(grid.size())) return false;
  atomic_store<Order::kRelaxed, Scope::kDevice>(arrivals, 0u);
  return true;
}

// Ends a block's part of a launch; true in one thread of all, the leader of the block that ends last.
MOE_A2A_DEVICE bool last_block_done(const Grid& grid, const Block& block, uint32_t* arrivals) {
  block.release_sync();
  return block.rank() == 0 && count_block(grid, arrivals);
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
