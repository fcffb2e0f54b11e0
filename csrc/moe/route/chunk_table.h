// Routing tables of large batches at the receiver: chunks of entries that the sender has counted (routing_table.h).
// ll_table.h has those of small and medium batches, with the same interface.
#pragma once

#include "moe/route/route.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// A choice at its receiver: the local expert (-1: not here), and how many entries of that expert precede it in its
// chunk or segment.
struct LocalChoice {
  int expert, idx;
};

class ChunkTable {
 public:
  MOE_A2A_DEVICE ChunkTable(const DispatchRecvArgs& args) : args_(args) {}

  MOE_A2A_DEVICE bool has(int num_tokens) const { return !config().sends_ll_choices(num_tokens); }

  // Waits for a chunk. Pairs with the signal in RoutingTable::send().
  MOE_A2A_DEVICE static bool receive_chunk(const DispatchRecvArgs& args, int rank, int chunk, int num_tokens,
                                           uint64_t epoch) {
    const Context& c = args.context;
    const WaitSite site{moe_op::kDispatchRecv, moe_kind::kTableWait, rank, chunk * chunk_length(num_tokens)};
    return wait_for(c.region.table_signal.at(args.buffer, rank, chunk), epoch, site, c.wait, c.heap);
  }

  // Called for the batch of each rank, before receive().
  MOE_A2A_DEVICE void expect(int num_tokens) { is_used_ |= has(num_tokens); }
  // Whether any rank's batch is here.
  MOE_A2A_DEVICE bool is_used() const { return is_used_; }

  // Waits for all chunks, a thread per chunk of any rank. The threads of a warp wait together: in a loop over the ranks
  // they would wait for one rank's chunks after the other's.
  MOE_A2A_DEVICE bool receive(const Block& block, const int32_t* num_tokens, uint64_t epoch) const {
    if (!is_used_) return true;
    int rank = 0;
    MOE_A2A_ROLLED
    for (int chunk = block.rank();; chunk += block.size()) {
      MOE_A2A_ROLLED
      for (; rank < config().num_ranks; ++rank) {
        const int here = has(num_tokens[rank]) ? num_chunks(num_tokens[rank]) : 0;
        if (chunk < here) break;
        chunk -= here;
      }
      if (rank == config().num_ranks) break;
      if (!receive_chunk(args_, rank, chunk, num_tokens[rank], epoch)) return false;
    }
    return true;
  }

  // How many entries of a list are in a rank's chunks [begin, end). Unrolled to keep several loads in flight.
  MOE_A2A_DEVICE int32_t sum(int rank, int list, int begin, int end) const {
    constexpr int kUnroll = kBlockThreads > 1 ? 8 : 1;
    const int num_lists = config().num_local_experts + 1;
    const int32_t* counts = args_.context.region.table_count.at(args_.buffer, rank, 0, list);
    int32_t sum = 0;
    MOE_A2A_ROLLED
    for (int first = begin; first < end; first += kUnroll) {
      int32_t count[kUnroll];
      MOE_A2A_UNROLL
      for (int u = 0; u < kUnroll; ++u) count[u] = first + u < end ? counts[(first + u) * num_lists] : 0;
      MOE_A2A_UNROLL
      for (int u = 0; u < kUnroll; ++u) sum += count[u];
    }
    return sum;
  }

  // A token's entries, shared by one or several threads; this is the `turn`-th.
  class Token {
   public:
    MOE_A2A_DEVICE Token(const DispatchRecvArgs& args, int rank, int token, int turn, int num_threads)
        : num_topk_(args.context.config.num_topk),
          begin_(first_choice(turn, num_threads)),
          end_(turn + 1 == num_threads ? num_topk_ : first_choice(turn + 1, num_threads)),
          config_(args.context.config),
          entries_(args.context.region.table_route.at(args.buffer, rank, token)),
          weights_(args.context.region.table_weight.at(args.buffer, rank, token)) {
      prefetch(entries_);
      prefetch(weights_);
      landed_idx_ = args.context.region.table_landed_idx(args.buffer, rank, token);
    }

    MOE_A2A_DEVICE int32_t landed_idx() const { return landed_idx_; }
    MOE_A2A_DEVICE bool is_leader() const { return begin_ == 0; }
    MOE_A2A_DEVICE float weight(int k) const { return weights_[k]; }
    MOE_A2A_DEVICE LocalChoice choice(int k) const { return local(entries_[k]); }

    // Calls visit(k, choice) for this thread's choices in k order, with loads of four where num_topk allows it.
    template <class Visit>
    MOE_A2A_DEVICE void visit_choices(const Visit& visit) const {
      if (num_topk_ % kVector != 0) {
        for (int k = begin_; k < end_; ++k) visit(k, choice(k));
        return;
      }
      for (int k = begin_; k < end_; k += kVector) {
        RouteEntry some[kVector];
        load_values(some, entries_ + k);
        for (int i = 0; i < kVector; ++i) visit(k + i, local(some[i]));
      }
    }

   private:
    static constexpr int kVector = 4;

    // Where a thread's choices begin: at a whole vector, or behind the last choice.
    MOE_A2A_DEVICE int first_choice(int turn, int num_threads) const {
      const int of_each = (num_topk_ + num_threads - 1) / num_threads;
      const int first = (of_each + kVector - 1) / kVector * kVector * turn;
      return first < num_topk_ ? first : num_topk_;
    }
    MOE_A2A_DEVICE LocalChoice local(RouteEntry entry) const {
      return {entry.is_dropped() ? -1 : local_expert(config_, entry.expert()), entry.idx_in_chunk()};
    }

    int num_topk_, begin_, end_;
    const MoeConfig& config_;
    const RouteEntry* entries_;
    const float* weights_;
    int32_t landed_idx_;
  };

 private:
  MOE_A2A_DEVICE const MoeConfig& config() const { return args_.context.config; }

  const DispatchRecvArgs& args_;
  bool is_used_ = false;
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
