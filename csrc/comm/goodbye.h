// A client's last launch: tells every rank that this one makes no more calls, and waits until every rank has said so.
// After that no rank writes into this rank's memory.
#pragma once

#include "comm/context.h"

namespace moe_a2a {

struct GoodbyeArgs {
  ClientContext context;
};

}  // namespace moe_a2a

namespace moe_a2a::inline MOE_A2A_TARGET {

struct Goodbye {
  using Args = GoodbyeArgs;
  static constexpr const char* kName = "goodbye";

  MOE_A2A_DEVICE static void run(const Args& args, const Grid&, const Block& block, std::byte*) {
    const ClientContext& c = args.context;
    const Array<Signal, 1>& goodbye = c.services.goodbye;
    if (block.rank() == 0) signal_many(c.heap, RankSet::all(c.heap.num_ranks), goodbye.at(c.heap.rank), 1);
    for (int r = block.rank(); r < c.heap.num_ranks; r += block.size()) {
      if (!wait_for(goodbye.at(r), 1, {Operation::kClose, TraceKind::kPeerWait, r}, c.wait, c.heap)) return;
    }
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
