// Finds the last block of a launch, which signals for all of them.
#pragma once

#include "arch/arch.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// Counts a block; true for the last one. Called by one thread, after a barrier of its block. All blocks' earlier reads
// and writes happen before what that thread does next: the barrier orders the block's own accesses, the acq_rel count
// orders the blocks. The last block resets the count; no block reads it before the next launch that counts there.
MOE_A2A_DEVICE bool count_block(const Grid& grid, uint32_t* arrivals) {
  const uint32_t before = atomic_add<Order::kAcqRel, Scope::kDevice>(arrivals, 1u);
  if (before + 1 != static_cast<uint32_t>(grid.size())) return false;
  atomic_store<Order::kRelaxed, Scope::kDevice>(arrivals, 0u);
  return true;
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
