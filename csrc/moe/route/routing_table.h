// The routing table of a rank, as it is sent to every rank: chunk by chunk, each by one block.
//
// The sender counts what the receiver would otherwise have to count in order: each choice carries how many of the same
// expert stand before it in its chunk, each token how many of its chunk land on the same rank before it. With one count
// per chunk and list, receivers place all entries independently of each other.
#pragma once

#include "moe/route/route.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

class RoutingTable {
 public:
  MOE_A2A_HOST_DEVICE static size_t shared_bytes(const MoeConfig& config) {
    return kMaxChunk * (sizeof(RankSet) + sizeof(uint16_t) * config.num_topk) + sizeof(int32_t) * kNumCounters;
  }

  MOE_A2A_DEVICE RoutingTable(const DispatchSendArgs& args, const Block& block, std::byte* shared)
      : args_(args), config_(args.context.config), heap_(args.context.heap), ws_(args.context.ws), block_(block) {
    ranks_ = reinterpret_cast<RankSet*>(shared);
    counters_ = reinterpret_cast<int32_t*>(ranks_ + kMaxChunk);
    expert_ = reinterpret_cast<uint16_t*>(counters_ + kNumCounters);
  }

  // Chunks go to the blocks in turn. A rank without tokens sends one that says so.
  MOE_A2A_DEVICE void send(const Grid& grid, uint64_t epoch) {
    const int chunks = num_chunks(args_.num_tokens), length = chunk_length(args_.num_tokens);
    for (int chunk = grid.rank(); chunk < (chunks > 0 ? chunks : 1); chunk += grid.size()) {
      chunk_ = chunk;
      first_token_ = chunk * length;
      const int rest = args_.num_tokens - first_token_;
      num_tokens_ = rest < length ? rest : length;
      const uint64_t start = trace_now();
      if (num_tokens_ > 0) send_chunk();
      block_.release_sync();
      if (block_.rank() == 0) {
        // Pairs with wait_for() in dispatch_recv's receive_tables().
        const uint32_t payload = chunk == 0 ? static_cast<uint32_t>(args_.num_tokens) : 0;
        signal_many(heap_, RankSet::all(heap_.num_ranks), mine(ws_.table_signal, chunk), epoch, payload);
      }
      record(args_.context.trace(), block_, {.kind = moe_kind::kRoute, .begin = start, .token = first_token_});
    }
  }

 private:
  // Counters of the experts of one pass, for every warp its own.
  static constexpr int kNumCounters = 4096;

  // This rank's element of a field that has a source rank.
  template <class T, int kRank, class... Index>
  MOE_A2A_DEVICE T* mine(const Array<T, kRank>& field, Index... index) const {
    return field.at(args_.buffer, heap_.rank, index...);
  }
  template <class T>
  MOE_A2A_DEVICE void store_to_all(T* local, T value) const {
    MOE_A2A_ROLLED
    for (int r = 0; r < heap_.num_ranks; ++r) *heap_.peer(r, local) = value;
  }

  MOE_A2A_DEVICE void send_chunk() {
    read_choices();
    find_ranks();
    const int experts_per_pass = kNumCounters / block_.num_warps();
    for (int first = 0; first < config_.num_experts; first += experts_per_pass) {
      const int end = first + experts_per_pass < config_.num_experts ? first + experts_per_pass : config_.num_experts;
      count_choices(first, end);
      send_counts(first, end);
      send_choices(first, end);
    }
    for (int r = block_.warp_rank(); r < heap_.num_ranks; r += block_.num_warps()) send_landings(block_.warp(), r);
  }

  // The choices into shared memory, the weights to every rank.
  MOE_A2A_DEVICE void read_choices() {
    const int num_topk = config_.num_topk;
    const int64_t first = static_cast<int64_t>(first_token_) * num_topk;
    MOE_A2A_ROLLED
    for (int i = block_.rank(); i < num_tokens_ * num_topk; i += block_.size()) {
      const int32_t expert = checked_choice(args_, first_token_ + i / num_topk, i % num_topk);
      const float weight = args_.topk_weights != nullptr ? args_.topk_weights[first + i] : 1.0f;
      expert_[i] = static_cast<uint16_t>(expert < 0 ? RouteEntry::kDropped : expert);
      store_to_all(mine(ws_.table_weight, first_token_) + i, weight);
      if (expert < 0) store_to_all(mine(ws_.table_route, first_token_) + i, RouteEntry::dropped());
    }
    block_.sync();
  }

  MOE_A2A_DEVICE void find_ranks() {
    MOE_A2A_ROLLED
    for (int t = block_.rank(); t < num_tokens_; t += block_.size()) {
      RankSet ranks;
      MOE_A2A_ROLLED
      for (int k = 0; k < config_.num_topk; ++k) {
        const uint16_t expert = expert_[t * config_.num_topk + k];
        if (expert != RouteEntry::kDropped) ranks.insert(rank_of_expert(config_, expert));
      }
      ranks_[t] = ranks;
      ws_.token_ranks(args_.buffer, first_token_ + t) = ranks;
    }
  }

  // Each warp has neighbouring choices, a few of the warps when there are few.
  MOE_A2A_DEVICE int choices_per_warp() const {
    const int size = block_.warp().size(), whole = size * block_.num_warps();
    return (num_tokens_ * config_.num_topk + whole - 1) / whole * size;
  }
  MOE_A2A_DEVICE int num_active_warps() const {
    return (num_tokens_ * config_.num_topk + choices_per_warp() - 1) / choices_per_warp();
  }

  // Calls visit(i, expert - first), or with -1 for a choice outside of the pass; all lanes go round equally often.
  template <class Visit>
  MOE_A2A_DEVICE void visit_choices(int first, int end, Visit visit) const {
    const Warp warp = block_.warp();
    const int count = num_tokens_ * config_.num_topk;
    const int begin = choices_per_warp() * block_.warp_rank(), rest = count - begin;
    const int stop = begin + (rest < choices_per_warp() ? rest : choices_per_warp());
    MOE_A2A_ROLLED
    for (int base = begin; base < stop; base += warp.size()) {
      const int i = base + warp.rank();
      const int expert = i < stop ? expert_[i] : -1;
      visit(i, expert >= first && expert < end ? expert - first : -1);
    }
  }

  // Each warp's choices of each expert.
  MOE_A2A_DEVICE void count_choices(int first, int end) {
    const int num = end - first;
    MOE_A2A_ROLLED
    for (int i = block_.rank(); i < num * num_active_warps(); i += block_.size()) counters_[i] = 0;
    block_.sync();
    visit_choices(first, end, [&](int, int expert) {
      if (expert >= 0) atomic_add<Order::kRelaxed, Scope::kBlock>(&counters_[block_.warp_rank() * num + expert], 1);
    });
    block_.sync();
  }

  // The sums over the warps; and in place of each warp's count, how many the warps before it have.
  MOE_A2A_DEVICE void send_counts(int first, int end) {
    const int num = end - first;
    MOE_A2A_ROLLED
    for (int e = block_.rank(); e < num; e += block_.size()) {
      int32_t total = 0;
      MOE_A2A_ROLLED
      for (int w = 0; w < num_active_warps(); ++w) {
        const int32_t count = counters_[w * num + e];
        counters_[w * num + e] = total;
        total += count;
      }
      const int rank = rank_of_expert(config_, first + e), local = first + e - rank * config_.num_local_experts();
      *heap_.peer(rank, mine(ws_.table_count, chunk_, local)) = total;
    }
    block_.sync();
  }

  MOE_A2A_DEVICE void send_choices(int first, int end) {
    const Warp warp = block_.warp();
    int32_t* counters = counters_ + block_.warp_rank() * (end - first);
    const int num_bits = bits_of_values(end - first);
    visit_choices(first, end, [&](int i, int expert) {
      const Matches matches = warp.matches(expert, num_bits);
      if (expert >= 0) {
        const int32_t idx_in_chunk = counters[expert] + matches.before;
        store_to_all(mine(ws_.table_route, first_token_) + i,
                     RouteEntry::pack(first + expert, static_cast<uint32_t>(idx_in_chunk)));
      }
      warp.sync();  // all have read before one moves the counter on
      if (expert >= 0 && matches.before == 0) counters[expert] += matches.total;
      warp.sync();
    });
    block_.sync();  // before the counters of the next pass, or of the next chunk
  }

  // One warp per rank: which tokens land there, numbered.
  MOE_A2A_DEVICE void send_landings(const Warp& warp, int rank) const {
    int32_t num_landed = 0;
    MOE_A2A_ROLLED
    for (int base = 0; base < num_tokens_; base += warp.size()) {
      const int t = base + warp.rank();
      const int32_t lands = t < num_tokens_ && ranks_[t].contains(rank);
      const int32_t up_to_here = num_landed + warp.inclusive_sum(lands);
      if (t < num_tokens_) {
        *heap_.peer(rank, mine(ws_.table_landing, first_token_ + t)) = lands ? up_to_here - 1 : -1;
      }
      num_landed = warp.last(up_to_here);
    }
    if (warp.rank() == 0) *heap_.peer(rank, mine(ws_.table_count, chunk_, config_.num_local_experts())) = num_landed;
  }

  const DispatchSendArgs& args_;
  const MoeConfig& config_;
  const HeapView& heap_;
  const Workspace& ws_;
  const Block& block_;
  RankSet* ranks_;     // [kMaxChunk]
  int32_t* counters_;  // [num_warps][experts of a pass]
  uint16_t* expert_;   // [kMaxChunk * num_topk]
  int chunk_ = 0, first_token_ = 0, num_tokens_ = 0;
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
