// Step 3 of 4: of each landed row, add up what the local experts made of it and push the one sum back to its owner.
#pragma once

#include "kernels/route.h"
#include "kernels/row.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

struct CombineSend {
  using Args = CombineSendArgs;
  static constexpr const char* kName = "combine_send";

  // Shared memory, per group that sends: the terms of its sum, or the row sender's staging.
  MOE_A2A_HOST_DEVICE static int64_t group_bytes(const Args& args) {
    if (!args.presummed) return Terms<float>::bytes(args.context.config.num_topk);
    return args.block_per_row ? 0 : staging_that_fits(warp_staging_bytes(row_bytes(args), false));
  }
  MOE_A2A_HOST_DEVICE static int num_senders(const Args& args) {
    constexpr int64_t kWarps = kBlockThreads / kWarpSize;
    const int64_t fits = group_bytes(args) > 0 ? static_cast<int64_t>(kMaxSharedBytes) / group_bytes(args) : kWarps;
    return static_cast<int>(args.block_per_row ? 1 : fits < kWarps ? fits : kWarps);
  }
  MOE_A2A_HOST_DEVICE static int64_t row_bytes(const Args& args) {
    return args.context.config.row_bytes(args.context.config.dtype);
  }
  static size_t shared_bytes(const Args& args) { return group_bytes(args) * num_senders(args); }

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte* shared) {
    const Context& c = args.context;
    const uint64_t epoch = c.ws.epoch(args.buffer);
    send(args, grid, block, shared, epoch);
    if (last_block_done(grid, block, c.ws.arrivals.at(args.buffer, Workspace::kCombineSend))) {
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

  // A sum on its way: to whom, for which of its tokens.
  struct Item {
    RankSet members;
    int token = 0;
  };

  MOE_A2A_DEVICE static Item item_of(const Args& args, int row) {
    const int max_tokens = args.context.config.num_max_tokens_per_rank;
    return {RankSet::only(row / max_tokens), row % max_tokens};
  }

  // The place of unit i in the list of landed rows. The list goes through the source ranks one after the other; units
  // go through R parts of it side by side, from another part on each rank, so that no rank is sent to by all at once.
  MOE_A2A_DEVICE static int landed_of(const Context& c, int num_rows, int i) {
    const int num_ranks = c.heap.num_ranks, whole = num_rows / num_ranks * num_ranks;
    if (i >= whole) return i;
    return (i + c.heap.rank + 1) % num_ranks * (whole / num_ranks) + i / num_ranks;
  }

  // One row is one unit: the groups take units in turn.
  MOE_A2A_DEVICE static void send(const Args& args, const Grid& grid, const Block& block, std::byte* shared,
                                  uint64_t epoch) {
    const Context& c = args.context;
    const int num_rows = c.ws.num_landed_rows(args.buffer, 0);
    const int senders = num_senders(args);
    if (args.block_per_row) {
      const auto signal = [&](const Item& item) {
        if (block.rank() == 0) signal_sum(args, item, epoch);
      };
      PlainRowSender<Block, Item, Target, decltype(signal)> sender(block, Target{args}, signal, nullptr);
      for (int i = grid.rank(); i < num_rows; i += grid.size())
        send_row(args, block, sender, signal, shared, num_rows, i);
      return;
    }
    if (block.warp_rank() >= senders) return;
    const Warp warp = block.warp();
    const auto signal = [&](const Item& item) {
      if (warp.rank() == 0) signal_sum(args, item, epoch);
    };
    std::byte* memory = shared + block.warp_rank() * group_bytes(args);
    const int first = grid.rank() + grid.size() * block.warp_rank(), stride = grid.size() * senders;
    if (args.presummed) {
      std::byte* staging = group_bytes(args) > 0 ? memory : nullptr;
      auto sender = make_warp_sender<Item>(warp, Target{args}, signal, staging, row_bytes(args));
      for (int i = first; i < num_rows; i += stride) send_row(args, warp, sender, signal, memory, num_rows, i);
      sender.finish();
    } else {
      PlainRowSender<Warp, Item, Target, decltype(signal)> sender(warp, Target{args}, signal, nullptr);
      for (int i = first; i < num_rows; i += stride) send_row(args, warp, sender, signal, memory, num_rows, i);
    }
  }

  // Where a sum lands.
  struct Target {
    const Args& args;
    MOE_A2A_DEVICE std::byte* operator()(const Item& item, int rank) const {
      const Context& c = args.context;
      return c.heap.peer(rank, c.ws.combine_row.at(args.buffer, c.heap.rank, item.token));
    }
  };

  // Pairs with wait_for() in combine_recv.
  MOE_A2A_DEVICE static void signal_sum(const Args& args, const Item& item, uint64_t epoch) {
    const Context& c = args.context;
    signal_many(c.heap, item.members, c.ws.combine_signal.at(args.buffer, c.heap.rank, item.token), epoch, 0, c.trace(),
                item.token);
  }

  // A row that the caller has summed is sent as it is; otherwise its sum is formed in registers on its way.
  template <class Group, class Sender, class Signal>
  MOE_A2A_DEVICE static void send_row(const Args& args, const Group& group, Sender& sender, const Signal& signal,
                                      std::byte* memory, int num_rows, int unit) {
    const Context& c = args.context;
    const int row = c.ws.landed_row(args.buffer, landed_of(c, num_rows, unit));
    const Item item = item_of(args, row);
    const int owner = item.members.first();
    const uint64_t start = trace_now(c.trace());
    if (args.presummed) {
      sender.send({.values = args.y[row], .num_value_bytes = row_bytes(args)}, item);
      record(c.trace(), group, {.kind = TraceKind::kSend, .begin = start, .peer = owner, .token = item.token});
      return;
    }
    with_element_type(c.config.dtype, [&](auto element) {
      using T = decltype(element);
      const Terms<T> terms = terms_of<T>(args, group, memory, row, item);
      add_rows(group, c.config.hidden, args.vector_rows, terms, reinterpret_cast<T*>(Target{args}(item, owner)));
    });
    group.release_sync();
    signal(item);
    record(c.trace(), group, {.kind = TraceKind::kSum, .begin = start, .peer = owner, .token = item.token});
  }

  // The outputs of the row's local experts, choice by choice in k order: the order of addition is part of the contract.
  template <class T, class Group>
  MOE_A2A_DEVICE static Terms<T> terms_of(const Args& args, const Group& group, std::byte* memory, int row,
                                          const Item& item) {
    const Context& c = args.context;
    const int src_rank = item.members.first();
    const int32_t* choices = c.ws.table_idx.at(args.buffer, src_rank, item.token);
    const float* weights = c.ws.table_weight.at(args.buffer, src_rank, item.token);
    const int32_t* positions = c.ws.row_route.at(args.buffer, row);
    if (group.rank() == 0) count_lost_routes(args, choices, positions);
    const auto y_row = [&](int k) -> const T* {
      if (local_expert(c.config, choices[k], c.config.rank) < 0) return nullptr;
      const int32_t position = positions[k];
      if (position < 0 || position >= args.num_y_rows) return nullptr;
      return reinterpret_cast<const T*>(args.y[position]);
    };
    return make_terms<T>(group, memory, c.config.num_topk, y_row, [&](int k) { return weights[k]; });
  }

  // Routes that stand behind the end of a `y` that is too short; raised at the next call that looks.
  MOE_A2A_DEVICE static void count_lost_routes(const Args& args, const int32_t* choices, const int32_t* positions) {
    const Context& c = args.context;
    for (int k = 0; k < c.config.num_topk; ++k) {
      if (local_expert(c.config, choices[k], c.config.rank) >= 0 && positions[k] >= args.num_y_rows) {
        count_fault(&c.wait.tally->num_short_y_routes, &c.wait.report->num_short_y_routes);
      }
    }
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
