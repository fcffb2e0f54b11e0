// What every MoE kernel is given: the sizes and the region, beside what a communicator gives each of its clients.
#pragma once

#include "comm/context.h"
#include "comm/launch_count.h"
#include "moe/moe_config.h"
#include "moe/moe_region.h"
#include "moe/vocabulary.h"

namespace moe_a2a {

struct Context : ClientContext {
  MoeConfig config;
  MoeRegion region;
};

// Lays out the region of `context.config` from the two bases, and points the context at it. With null bases only the
// size means anything.
RegionSize place_region(Context& context, std::byte* symmetric_base, std::byte* local_base);

}  // namespace moe_a2a

namespace moe_a2a::inline MOE_A2A_TARGET {

// Counts a block of a launch; true for the last one, which also resets the launch's tickets.
MOE_A2A_DEVICE bool count_block(const Grid& grid, const MoeRegion& region, int buffer, MoeRegion::Launch launch) {
  if (!count_block(grid, region.arrivals.at(buffer, launch))) return false;
  region.tickets(buffer, launch) = 0;
  return true;
}

// Ends a block's part of a launch; true in one thread of all, the leader of the block that ends last.
MOE_A2A_DEVICE bool last_block_done(const Grid& grid, const Block& block, const MoeRegion& region, int buffer,
                                    MoeRegion::Launch launch) {
  block.release_sync();
  return block.rank() == 0 && count_block(grid, region, buffer, launch);
}

// The part that a block of a fused launch plays, on the track of each of its warps.
MOE_A2A_DEVICE void record_role(const Context& c, const Block& block, Operation role, uint64_t start) {
  record(c.trace(), block.warp(), {.kind = TraceKind::kKernel, .begin = start, .token = static_cast<int>(role)});
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
