// The routing table that a rank with a large batch sends to every rank: chunks of tokens, each sent by one block.
//
// The sender counts what receivers would otherwise have to count in order: each entry says how many entries of its
// expert precede it in the chunk, each token how many of the chunk's tokens land on that rank before it. With one count
// per chunk and list, receivers place all entries independently.
#pragma once

#include "arch/shared_plan.h"
#include "moe/route/route.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

class RoutingTable {
 public:
  struct Plan {
    SharedPart<RankSet> ranks;     // [kMaxChunk]  to which each token goes
    SharedPart<int32_t> counters;  // [warps, experts of a pass]
    SharedPart<uint16_t> experts;  // [kMaxChunk, num_topk]
    int bytes = 0;
  };
  MOE_A2A_HOST_DEVICE static Plan plan(const MoeConfig& config) {
    SharedCarver carver;
    Plan plan;
    plan.ranks = carver.take<RankSet>(kMaxChunk);
    plan.counters = carver.take<int32_t>(kNumCounters);
    plan.experts = carver.take<uint16_t>(kMaxChunk * config.num_topk);
    plan.bytes = carver.bytes();
    return plan;
  }

  MOE_A2A_DEVICE RoutingTable(const DispatchSendArgs& args, const Block& block, std::byte* shared)
      : args_(args),
        config_(args.context.config),
        heap_(args.context.heap),
        region_(args.context.region),
        block_(block) {
    const Plan plan = RoutingTable::plan(config_);
    ranks_ = plan.ranks.in(shared);
    counters_ = plan.counters.in(shared);
    expert_ = plan.experts.in(shared);
  }

  // Chunks go to the blocks round-robin. A rank without tokens sends one chunk that says so.
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
        // Pairs with the acquires in dispatch_recv: receive_headers() and ChunkTable::receive_chunk().
        const uint32_t payload = chunk == 0 ? args_.header() : 0;
        signal_many(heap_, RankSet::all(heap_.num_ranks), mine(region_.table_signal, chunk), epoch, payload);
      }
      record(args_.context.trace(), block_, {.kind = moe_kind::kRoute, .begin = start, .token = first_token_});
    }
  }

 private:
  // Counters for one pass over the experts, a set per warp.
  static constexpr int kNumCounters = 4096;

  // This rank's element of a field indexed by source rank.
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
      send_entries(first, end);
    }
    for (int r = block_.warp_rank(); r < heap_.num_ranks; r += block_.num_warps()) send_landed(block_.warp(), r);
  }

  // Reads the choices into shared memory and sends the weights to every rank.
  MOE_A2A_DEVICE void read_choices() {
    const int num_topk = config_.num_topk;
    MOE_A2A_ROLLED
    for (int i = block_.rank(); i < num_tokens_ * num_topk; i += block_.size()) {
      const int token = first_token_ + i / num_topk, k = i % num_topk;
      const int32_t expert = checked_choice(args_, token, k);
      const float weight = weight_of_choice(args_, token, k);
      expert_[i] = static_cast<uint16_t>(expert < 0 ? RouteEntry::kDropped : expert);
      store_to_all(mine(region_.table_weight, first_token_) + i, weight);
      if (expert < 0) store_to_all(mine(region_.table_route, first_token_) + i, RouteEntry::dropped());
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
      region_.token_ranks(args_.buffer, first_token_ + t) = ranks;
    }
  }

  // Each warp counts a run of neighbouring choices; with few choices, only some warps have one.
  struct Run {
    int begin, end;
  };
  MOE_A2A_DEVICE int choices_per_warp() const {
    const int size = block_.warp().size(), whole = size * block_.num_warps();
    return (num_tokens_ * config_.num_topk + whole - 1) / whole * size;
  }
  MOE_A2A_DEVICE int num_active_warps() const {
    return (num_tokens_ * config_.num_topk + choices_per_warp() - 1) / choices_per_warp();
  }
  MOE_A2A_DEVICE Run run_of_warp() const {
    const int begin = choices_per_warp() * block_.warp_rank(), rest = num_tokens_ * config_.num_topk - begin;
    return {begin, begin + (rest < choices_per_warp() ? rest : choices_per_warp())};
  }
  // The choice's expert, relative to the first of the pass; -1: outside the pass.
  MOE_A2A_DEVICE int expert_in_pass(int i, int first, int end) const {
    const int expert = expert_[i];
    return expert >= first && expert < end ? expert - first : -1;
  }

  // Counts each warp's choices per expert. (The block ranks of CUB and rocPRIM fix the numbers of experts and choices
  // at compile time. With 256 and 2048 they are 594 and 649 instructions long; these three steps, 314 and 400.)
  MOE_A2A_DEVICE void count_choices(int first, int end) {
    const int num = end - first;
    MOE_A2A_ROLLED
    for (int i = block_.rank(); i < num * num_active_warps(); i += block_.size()) counters_[i] = 0;
    block_.sync();
    const Warp warp = block_.warp();
    const Run run = run_of_warp();
    MOE_A2A_ROLLED
    for (int i = run.begin + warp.rank(); i < run.end; i += warp.size()) {
      const int expert = expert_in_pass(i, first, end);
      if (expert >= 0) atomic_add<Order::kRelaxed, Scope::kBlock>(&counters_[block_.warp_rank() * num + expert], 1);
    }
    block_.sync();
  }

  // Sends the sums over the warps, and replaces each warp's count by the sum over the warps before it.
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
      const int rank = rank_of_expert(config_, first + e), local = first + e - rank * config_.num_local_experts;
      *heap_.peer(rank, mine(region_.table_count, chunk_, local)) = total;
    }
    block_.sync();
  }

  MOE_A2A_DEVICE void send_entries(int first, int end) {
    const Run run = run_of_warp();
    number_equal(
        block_.warp(), run.begin, run.end, bits_of_values(end - first), counters_ + block_.warp_rank() * (end - first),
        [&](int i) { return expert_in_pass(i, first, end); },
        [&](int i, int expert, int idx_in_chunk) {
          store_to_all(mine(region_.table_route, first_token_) + i,
                       RouteEntry::pack(first + expert, static_cast<uint32_t>(idx_in_chunk)));
        });
    block_.sync();  // before the counters serve the next pass or chunk
  }

  // One warp per rank: numbers the tokens that land there.
  MOE_A2A_DEVICE void send_landed(const Warp& warp, int rank) const {
    int32_t* landed_idx = heap_.peer(rank, mine(region_.table_landed_idx, first_token_));
    const int32_t num_landed = number_members(
        warp, 0, num_tokens_, [&](int t) { return ranks_[t].contains(rank); },
        [&](int t, int32_t idx) { landed_idx[t] = idx; });
    if (warp.rank() == 0) *heap_.peer(rank, mine(region_.table_count, chunk_, config_.num_local_experts)) = num_landed;
  }

  const DispatchSendArgs& args_;
  const MoeConfig& config_;
  const HeapView& heap_;
  const MoeRegion& region_;
  const Block& block_;
  RankSet* ranks_;
  int32_t* counters_;
  uint16_t* expert_;
  int chunk_ = 0, first_token_ = 0, num_tokens_ = 0;
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
