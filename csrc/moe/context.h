// What every kernel of an ExpertParallel is given: the sizes, the memory, the peers, the deadline.
#pragma once

#include "arch/arch.h"
#include "comm/heap_view.h"
#include "comm/wait.h"
#include "moe/moe_config.h"
#include "moe/workspace.h"

namespace moe_a2a {

struct Context {
  MoeConfig config;
  HeapView heap;
  Workspace ws;
  WaitPolicy wait;
  int max_shared_bytes = 0;  // that a block may use

  // Where the kernels leave their records; waits leave theirs there too.
  MOE_A2A_HOST_DEVICE const TraceBuffer& trace() const { return wait.trace; }
};

}  // namespace moe_a2a

namespace moe_a2a::inline MOE_A2A_TARGET {

// Counts a block of a launch, by one thread of it behind a barrier of the block; true for the last one, which then
// speaks for the whole launch. Everything that all blocks read and wrote before comes before what that thread does
// next: the barrier brings a block's own work together, the acq_rel count brings the blocks together. The last one also
// sets the count and the launch's tickets back, which nobody reads again before the next launch of the same kernel on
// this buffer.
MOE_A2A_DEVICE bool count_block(const Grid& grid, const Workspace& ws, int buffer, Workspace::Launch launch) {
  uint32_t* arrivals = ws.arrivals.at(buffer, launch);
  const uint32_t before = atomic_add<Order::kAcqRel, Scope::kDevice>(arrivals, 1u);
  if (before + 1 != static_cast<uint32_t>(grid.size())) return false;
  atomic_store<Order::kRelaxed, Scope::kDevice>(arrivals, 0u);
  ws.tickets(buffer, launch) = 0;
  return true;
}

// Ends a block's part of a launch; true in one thread of all, the leader of the block that ends last.
MOE_A2A_DEVICE bool last_block_done(const Grid& grid, const Block& block, const Workspace& ws, int buffer,
                                    Workspace::Launch launch) {
  block.release_sync();
  return block.rank() == 0 && count_block(grid, ws, buffer, launch);
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
