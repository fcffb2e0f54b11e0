// Step 3 of 4: of each landed row, add up what the local experts made of it and push the one sum back to its owner.
#pragma once

#include "kernels/route.h"
#include "kernels/row.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

struct CombineSend {
  using Args = CombineSendArgs;
  static constexpr const char* kName = "combine_send";

  static size_t shared_bytes(const Args&) { return 0; }

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte*) {
    const Context& c = args.context;
    const uint64_t epoch = c.ws.epoch(args.buffer);
    const int num_rows = c.ws.num_landed_rows(args.buffer, 0);
    if (args.block_per_row) {
      for (int i = grid.rank(); i < num_rows; i += grid.size()) send_sum(args, block, i, epoch);
    } else {
      for (int i = grid.rank() + grid.size() * block.warp_rank(); i < num_rows; i += grid.size() * block.num_warps()) {
        send_sum(args, block.warp(), i, epoch);
      }
    }
    if (last_block_done(grid, block, c.ws.arrivals.at(args.buffer, Workspace::kCombineSend)) && block.rank() == 0) {
      return_credit(c, args.buffer, epoch);
    }
  }

  // Tells every rank, also those that sent nothing, that its part of this buffer is no longer read here. Pairs with
  // wait_for_credits() in dispatch_send. (The combine rows need no credit of their own: a rank sends the routing table
  // of its next dispatch on this buffer after its combine_recv, and we write its combine rows again only after that
  // table has come, from every rank, tokens or none.)
  MOE_A2A_DEVICE static void return_credit(const Context& c, int buffer, uint64_t epoch) {
    signal_many(c.heap, RankSet::all(c.heap.num_ranks), c.ws.dispatch_credit.at(buffer, c.heap.rank), epoch);
  }

  template <class Group>
  MOE_A2A_DEVICE static void send_sum(const Args& args, const Group& group, int landed, uint64_t epoch) {
    const Context& c = args.context;
    const int row = c.ws.landed_row(args.buffer, landed);
    const int src_rank = row / c.config.num_max_tokens_per_rank, token = row % c.config.num_max_tokens_per_rank;
    std::byte* target = c.heap.peer(src_rank, c.ws.combine_row.at(args.buffer, c.heap.rank, token));
    if (args.presummed) {
      const int64_t bytes = c.config.row_bytes(c.config.dtype);
      multicast_bytes(group, RankSet::only(src_rank), [&](int) { return target; }, args.y[row], bytes);
    } else {
      with_element_type(c.config.dtype, [&](auto element) {
        add_routes(args, group, row, src_rank, token, reinterpret_cast<decltype(element)*>(target));
      });
    }
    group.release_sync();
    if (group.rank() == 0) {
      // Pairs with wait_for() in combine_recv.
      signal_many(c.heap, RankSet::only(src_rank), c.ws.combine_signal.at(args.buffer, c.heap.rank, token), epoch);
    }
  }

  // Choice by choice in k order: the order of addition is part of the contract.
  template <class T, class Group>
  MOE_A2A_DEVICE static void add_routes(const Args& args, const Group& group, int row, int src_rank, int token,
                                        T* target) {
    const Context& c = args.context;
    const int32_t* choices = c.ws.table_idx.at(args.buffer, src_rank, token);
    const float* weights = c.ws.table_weight.at(args.buffer, src_rank, token);
    const int32_t* positions = c.ws.row_route.at(args.buffer, row);
    if (group.rank() == 0) count_lost_routes(args, choices, positions);
    const auto y_row = [&](int k) -> const T* {
      if (local_expert(c.config, choices[k], c.config.rank) < 0) return nullptr;
      const int32_t position = positions[k];
      if (position < 0 || position >= args.num_y_rows) return nullptr;
      return reinterpret_cast<const T*>(args.y[position]);
    };
    add_rows<T>(group, c.config.hidden, args.vector_rows, c.config.num_topk, y_row,
                [&](int k) { return weights[k]; }, target);
  }

  // Routes that stand behind the end of a `y` that is too short; raised at the next call that looks.
  MOE_A2A_DEVICE static void count_lost_routes(const Args& args, const int32_t* choices, const int32_t* positions) {
    const Context& c = args.context;
    for (int k = 0; k < c.config.num_topk; ++k) {
      if (local_expert(c.config, choices[k], c.config.rank) >= 0 && positions[k] >= args.num_y_rows) {
        atomic_add<Order::kRelaxed, Scope::kSystem>(&c.wait.report->num_short_y_routes, 1u);
      }
    }
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
