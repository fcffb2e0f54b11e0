// Step 2 of 4: take the routing tables, write the expert lists while rows fly, then see every row land.
#pragma once

#include "kernels/expert_lists.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

struct DispatchRecv {
  using Args = DispatchRecvArgs;
  static constexpr const char* kName = "dispatch_recv";

  static size_t shared_bytes(const Args& args) { return ExpertLists::shared_bytes(args.context.config); }

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte* shared) {
    receive(args, grid, block, shared, args.context.ws.epoch(args.buffer));
  }

  MOE_A2A_DEVICE static void receive(const Args& args, const Grid& grid, const Block& block, std::byte* shared,
                                     uint64_t epoch) {
    ExpertLists lists(args, grid, block, shared);
    if (!receive_tables(args, block, lists.num_tokens(), epoch)) return;
    const uint64_t start = trace_now(args.context.trace());
    lists.build();
    record(args.context.trace(), block, {.kind = TraceKind::kLists, .begin = start});
    receive_rows(args, grid, block, lists.num_tokens(), epoch);
  }

  // All ranks' tables, the number of tokens of each in num_tokens [num_ranks]. A rank that refused brings none.
  MOE_A2A_DEVICE static bool receive_tables(const Args& args, const Block& block, int32_t* num_tokens, uint64_t epoch) {
    const Context& c = args.context;
    bool good = true;
    for (int r = block.rank(); r < c.heap.num_ranks; r += block.size()) {
      uint32_t payload = 0;
      const WaitSite site{Operation::kDispatchRecv, Phase::kRoutingTable, r, -1, args.buffer};
      good &= wait_for(c.ws.table_signal.at(args.buffer, r, 0), epoch, site, c.wait, c.heap, &payload);
      if (payload == Workspace::kRefused) {
        write_report(c.wait, c.heap, site, Reason::kRefused, 0, epoch, Signal::pack(epoch, payload), 0);
        payload = 0;
      }
      num_tokens[r] = static_cast<int32_t>(payload);
    }
    if (block.any(!good)) return false;  // also the barrier after which all threads may read num_tokens
    for (int r = 0; r < c.heap.num_ranks; ++r) {
      for (int chunk = 1 + block.rank(); chunk < num_chunks(num_tokens[r]); chunk += block.size()) {
        const WaitSite site{Operation::kDispatchRecv, Phase::kRoutingTable, r, chunk * kTableChunk};
        good &= wait_for(c.ws.table_signal.at(args.buffer, r, chunk), epoch, site, c.wait, c.heap);
      }
    }
    return !block.any(!good);
  }

  // The pieces of the rows of all ranks lie on one line, along which the threads go side by side. A token of which no
  // expert lives here sends no row.
  MOE_A2A_DEVICE static void receive_rows(const Args& args, const Grid& grid, const Block& block,
                                          const int32_t* num_tokens, uint64_t epoch) {
    const Context& c = args.context;
    const int64_t stride = int64_t{grid.size()} * block.size();
    int64_t unit = int64_t{grid.rank()} * block.size() + block.rank();
    for (int r = 0; r < c.heap.num_ranks; ++r) {
      const int pieces = c.config.num_pieces(num_tokens[r]);
      const int64_t num_units = int64_t{num_tokens[r]} * pieces;
      for (; unit < num_units; unit += stride) {
        const int token = static_cast<int>(unit / pieces);
        if (c.ws.table_landing(args.buffer, r, token) < 0) continue;
        const WaitSite site{Operation::kDispatchRecv, Phase::kRow, r, token};
        if (!wait_for(c.ws.row_signal.at(args.buffer, r, unit), epoch, site, c.wait, c.heap)) return;
      }
      unit -= num_units;  // on the next rank's part of the line
    }
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
