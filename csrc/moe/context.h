// What every MoE kernel gets: the sizes and the region, on top of what every client's kernels get.
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

  // For one batch; see MoeConfig::with_bound(). Its rows land without gaps between those of the ranks.
  Context with_bound(int num_tokens) const {
    Context context = *this;
    context.config = config.with_bound(num_tokens);
    context.region.row.stride[1] = num_tokens * region.row.stride[2];
    return context;
  }
};

// Lays out the region of `context.config` from the two bases and points the context at it. With null bases only the
// returned size is valid.
RegionSize place_region(Context& context, std::byte* symmetric_base, std::byte* local_base);

}  // namespace moe_a2a

namespace moe_a2a::inline MOE_A2A_TARGET {

// Called by one thread, once no other reads the buffer's epoch. Nobody uses the queue of the next one.
MOE_A2A_DEVICE void advance_epoch(const MoeRegion& region, int buffer, uint64_t epoch) {
  region.tickets(buffer, MoeRegion::dispatch_queue(epoch + 1)) = 0;
  region.epoch(buffer) = epoch;
}

// Called if a wait of a dispatch gave up. What was queued behind it must send nothing: a rank that is only late would
// take the rows of a later dispatch, or sums of rows that are not here, for those of this one.
MOE_A2A_RARE void give_up(const Context& c) {
  atomic_store<Order::kRelaxed, Scope::kDevice>(c.region.has_given_up.data, 1u);
}

// Records a role in a fused launch: a warp's on its own track, a block's on that of its first warp.
template <class Group>
MOE_A2A_DEVICE void record_role(const Context& c, const Group& group, Operation role, uint64_t start) {
  record(c.trace(), group, {.kind = TraceKind::kKernel, .begin = start, .token = static_cast<int>(role)});
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
