// Step 2 of 4: receive the routing tables, write the expert lists while rows are in flight, then wait for every row.
#pragma once

#include "moe/route/expert_lists.h"
#include "moe/wires.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// The batch of site.peer is of another kind, so none of it is used. That peer finds the same about this rank's batch,
// but may have queued its combine already: refuse it.
MOE_A2A_RARE void refuse_rows(const DispatchRecvArgs& args, WaitSite site, uint32_t theirs, uint64_t epoch) {
  using Kind = BatchHeader::Kind;
  const Context& c = args.context;
  const uint32_t own = BatchHeader::pack(c.config, 0, args.format);
  site.awaited = moe_kind::kOtherRows;
  site.token = static_cast<int32_t>(Kind::of(own).packed() << 8 | Kind::of(theirs).packed());
  write_report(c.wait, c.heap, site, Reason::kRefused, static_cast<uint32_t>(args.number), epoch, 0, 0);
  signal_many(c.heap, RankSet::only(site.peer), c.region.combine_refusal.at(args.buffer, c.heap.rank), epoch,
              RefusalCount::kFinal);
}

struct DispatchRecv {
  using Args = DispatchRecvArgs;
  static constexpr const char* kName = "dispatch_recv";

  struct Plan {
    SharedPart<int32_t> num_tokens;  // [warps, num_ranks]  one row per warp
    ExpertLists::Plan lists;
    int bytes = 0;
  };
  MOE_A2A_HOST_DEVICE static Plan plan(const MoeConfig& config) {
    SharedCarver carver;
    Plan plan;
    plan.num_tokens = carver.take<int32_t>(kBlockWarps * config.num_ranks);
    plan.lists = ExpertLists::plan(config, carver.bytes());
    plan.bytes = plan.lists.bytes;
    return plan;
  }
  static size_t shared_bytes(const Args& args) { return plan(args.context.config).bytes; }

  // The first blocks write the lists while the others wait for rows; a single block does both.
  struct Roles {
    Grid lists, rows;
  };
  MOE_A2A_DEVICE static Roles roles(const Grid& grid) {
    if (grid.size() == 1) return {grid, grid};
    const int half = grid.size() / 2, writers = ExpertLists::kBlocksOfUse < half ? ExpertLists::kBlocksOfUse : half;
    return {Grid{grid.rank(), writers}, Grid{grid.rank() - writers, grid.size() - writers}};
  }

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte* shared) {
    const MoeRegion& region = args.context.region;
    if (region.is_void(args.buffer) == 0) receive(args, roles(grid), block, shared, region.epoch(args.buffer));
  }

  MOE_A2A_DEVICE static void receive(const Args& args, const Roles& roles, const Block& block, std::byte* shared,
                                     uint64_t epoch) {
    const MoeConfig& config = args.context.config;
    const Plan plan = DispatchRecv::plan(config);
    int32_t* num_tokens = plan.num_tokens.in(shared) + block.warp_rank() * config.num_ranks;
    const auto headers = [&] { return receive_headers(args, block.warp(), num_tokens, epoch); };
    if (has_part_in(roles.lists)) {
      const uint64_t start = trace_now();
      ExpertLists lists(args, roles.lists, block, shared, plan.lists, num_tokens);
      if (!lists.build(epoch, headers)) return give_up(args.context);
      record(args.context.trace(), block, {.kind = moe_kind::kLists, .begin = start});
    }
    if (!has_part_in(roles.rows)) return;
    const bool good = headers() && see_announcements(args, block, num_tokens, epoch) &&
                      receive_rows<SmallBatch>(args, roles.rows, block, num_tokens, epoch) &&
                      receive_rows<MediumBatch>(args, roles.rows, block, num_tokens, epoch) &&
                      receive_rows<LargeBatch>(args, roles.rows, block, num_tokens, epoch);
    if (!good) give_up(args.context);
  }

 private:
  // Fills the warp's num_tokens [num_ranks] with the number of tokens that each rank has sent, by either wire. A rank
  // that refused has sent none, and one with a batch of another kind none that can be used.
  MOE_A2A_DEVICE static bool receive_headers(const Args& args, const Warp& warp, int32_t* num_tokens, uint64_t epoch) {
    const Context& c = args.context;
    bool good = true;
    for (int r = warp.rank(); r < c.heap.num_ranks; r += warp.size()) {
      uint32_t header = 0;
      const WaitSite site{moe_op::kDispatchRecv, moe_kind::kTableWait, r, -1, args.buffer};
      const Signal* signal = c.region.table_signal.at(args.buffer, r, 0);
      const bool is_here = wait_until(epoch, site, c.wait, c.heap, {}, [&](uint64_t& seen) {
        // In flight together with the LL word: one after the other they would double the time of a poll.
        const uint64_t polled = atomic_load<Order::kRelaxed, Scope::kSystem>(&signal->word);
        if (c.config.num_max_ll_tokens > 0 && find_ll_header(c, args.buffer, r, epoch, &header)) return true;
        seen = polled;
        // Pairs with RoutingTable::send() and RefuseDispatch.
        return Signal::reached(polled, epoch) && has_arrived(signal, epoch, seen, &header);
      });
      good &= is_here;
      const bool is_alike = BatchHeader::has_bound_of(c.config, header) && BatchHeader::format(header) == args.format;
      num_tokens[r] = is_alike ? BatchHeader::num_tokens(c.config, header) : 0;
      if (header == BatchHeader::kRefused) {
        write_report(c.wait, c.heap, site, Reason::kRefused, static_cast<uint32_t>(args.number), epoch,
                     Signal::pack(epoch, header), 0);
      } else if (is_here && !is_alike) {
        refuse_rows(args, site, header, epoch);
      }
    }
    return !warp.any(!good);  // also lets all lanes read num_tokens
  }

  // ---- rows

  // The rows of all batches of this kind, as one sequence of units: parts of tokens. False if a wait gave up.
  template <class Batch>
  MOE_A2A_DEVICE static bool receive_rows(const Args& args, const Grid& grid, const Block& block,
                                          const int32_t* num_tokens, uint64_t epoch) {
    const MoeConfig& config = args.context.config;
    const Exchange exchange = dispatch_rows(args.context, args.buffer, epoch);
    RoundRobin<> turns = turns_of(std::type_identity<typename Batch::Wire>{}, grid, block);
    for (int r = 0; r < config.num_ranks; ++r) {
      if (!is<Batch>(config, num_tokens[r], args.row_dtype())) continue;
      const int parts = Batch::Wire::kIsLl ? config.num_pieces() : Batch::kHasTable ? 1 : config.num_topk;
      const Divisor& by_parts = Batch::Wire::kIsLl ? config.by_pieces : config.by_topk;
      const bool good = turns.walk(num_tokens[r] * parts, [&](int unit) {
        const auto [token, part] = Batch::kHasTable ? Division{unit, 0} : by_parts.divide(unit);
        const WaitSite site{moe_op::kDispatchRecv, moe_kind::kRowWait, r, token};
        return receive(std::type_identity<Batch>{}, args, exchange, block.warp(), num_tokens[r], part, site);
      });
      if (!good) return false;
    }
    return true;
  }

  // Whole rows: one thread waits per unit. LL: one warp takes each piece, last warps first, since the first may still
  // send.
  MOE_A2A_DEVICE static RoundRobin<> turns_of(std::type_identity<RowWire>, const Grid& grid, const Block& block) {
    return {grid.rank() * block.size() + block.rank(), grid.size() * block.size()};
  }
  MOE_A2A_DEVICE static RoundRobin<> turns_of(std::type_identity<LlWire>, const Grid& grid, const Block& block) {
    return make_round_robin(grid, block.num_warps() - 1 - block.warp_rank(), block.num_warps());
  }

  // A token without an expert here sends no row; its table entry, or its choices, say so. receive_headers() has waited
  // for chunk 0.
  MOE_A2A_DEVICE static bool receive(std::type_identity<LargeBatch>, const Args& args, const Exchange& exchange,
                                     const Warp&, int num_tokens, int /*part*/, const WaitSite& site) {
    const int chunk = site.token / chunk_length(num_tokens);
    if (chunk > 0 && !ChunkTable::receive_chunk(args, site.peer, chunk, num_tokens, exchange.epoch)) return false;
    if (args.context.region.table_landed_idx(args.buffer, site.peer, site.token) < 0) return true;
    return RowWire::receive(exchange, site);
  }
  // One thread per choice: each that chose an expert here waits for the row.
  MOE_A2A_DEVICE static bool receive(std::type_identity<MediumBatch>, const Args& args, const Exchange& exchange,
                                     const Warp&, int /*num_tokens*/, int k, const WaitSite& site) {
    int expert;
    float weight;
    if (!receive_choice(args.context, args.buffer, site.peer, site.token, k, exchange.epoch, k == 0, &expert,
                        &weight)) {
      return false;
    }
    return expert < 0 || RowWire::receive(exchange, site);
  }
  MOE_A2A_DEVICE static bool receive(std::type_identity<SmallBatch>, const Args& args, const Exchange& exchange,
                                     const Warp& warp, int /*num_tokens*/, int piece, const WaitSite& site) {
    const Context& c = args.context;
    bool good = true, lands = false;
    for (int k = warp.rank(); k < c.config.num_topk; k += warp.size()) {
      int expert;
      float weight;
      good &= receive_choice(c, args.buffer, site.peer, site.token, k, exchange.epoch, k == 0, &expert, &weight);
      lands |= expert >= 0;
    }
    if (warp.any(!good)) return false;
    return !warp.any(lands) || LlWire::receive(exchange, c.config.row(args.row_dtype()), warp, piece, site);
  }

  // The signals that accompany small batches: once one is acquired, this rank may write where its sender read sums
  // before. (For other batches each row's signal gives that order. A rank without tokens, or one whose rows were
  // refused, gets no sums.) Pairs with the release in DispatchSend::announce().
  MOE_A2A_DEVICE static bool see_announcements(const Args& args, const Block& block, const int32_t* num_tokens,
                                               uint64_t epoch) {
    const Context& c = args.context;
    bool good = true;
    for (int r = block.rank(); r < c.heap.num_ranks; r += block.size()) {
      const WaitSite site{moe_op::kDispatchRecv, moe_kind::kTableWait, r};
      if (num_tokens[r] > 0 && is<SmallBatch>(c.config, num_tokens[r], args.row_dtype())) {
        good &= wait_for(c.region.table_signal.at(args.buffer, r, 0), epoch, site, c.wait, c.heap);
      }
    }
    return !block.warp().any(!good);  // the rows are received by whole warps
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
