// Which rows each local expert works on: lists of positions, put together from the routing tables of all ranks.
//
// A list is one local expert's routes in (source rank, token, choice) order; one more list holds the landed rows. The
// tables carry each entry's place within its chunk and each chunk's counts (those of small batches are counted here,
// see ll_table.h), so a prefix sum over the chunks is all that is left: every block that has something to write makes
// it for itself and then writes the entries of its chunks, in any order.
#pragma once

#include "kernels/ll_table.h"
#include "kernels/route.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// Waits for a chunk of a large batch's table. Pairs with the signal in routing_table.h.
MOE_A2A_DEVICE bool receive_chunk(const DispatchRecvArgs& args, int rank, int chunk, uint64_t epoch) {
  const Context& c = args.context;
  const WaitSite site{Operation::kDispatchRecv, Phase::kRoutingTable, rank, chunk * kTableChunk};
  return wait_for(c.ws.table_signal.at(args.buffer, rank, chunk), epoch, site, c.wait, c.heap);
}

class ExpertLists {
 public:
  MOE_A2A_HOST_DEVICE static size_t shared_bytes(const MoeConfig& config) {
    return sizeof(int32_t) * num_words(config) + LlTable::shared_bytes(config);
  }

  // `num_tokens` [num_ranks]: in shared memory, this warp's own.
  MOE_A2A_DEVICE ExpertLists(const DispatchRecvArgs& args, const Grid& grid, const Block& block, std::byte* shared,
                             int32_t* num_tokens)
      : args_(args),
        config_(args.context.config),
        ws_(args.context.ws),
        grid_(grid),
        block_(block),
        ll_table_(args.context, args.buffer, block, shared + sizeof(int32_t) * num_words(config_)),
        num_tokens_(num_tokens) {
    count_ = reinterpret_cast<int32_t*>(shared);
    start_ = count_ + num_lists();
    next_ = start_ + num_lists();
  }

  // Blocks that are of use for writing the lists of small batches: one for each part, and one for the counts.
  MOE_A2A_DEVICE static int num_blocks_of_use(const MoeConfig& config) {
    return config.num_ranks * LlTable::most_segments(config) + 1;
  }

  // False when a wait was given up. `receive_headers`, called by every warp, fills its num_tokens.
  template <class ReceiveHeaders>
  MOE_A2A_DEVICE bool build(uint64_t epoch, ReceiveHeaders receive_headers) {
    const bool good = receive_headers() && receive_chunks(epoch) && ll_table_.receive(num_tokens_, epoch);
    if (block_.any(!good)) return false;
    ll_table_.count(num_tokens_);
    add_up_chunks();
    place_experts();
    // The last blocks have the least to write.
    const int last = grid_.size() - 1;
    if (grid_.rank() == last) publish_counts();
    if (grid_.rank() == (last > 0 ? last - 1 : 0)) publish_ranks();
    write_chunks();
    if (args_.layout == Layout::kExpertMajor) {
      for (int e = grid_.rank(); e < config_.num_local_experts(); e += grid_.size()) write_padding(e);
    }
    return true;
  }

 private:
  MOE_A2A_DEVICE int num_lists() const { return config_.num_local_experts() + 1; }
  MOE_A2A_DEVICE int landed_list() const { return config_.num_local_experts(); }
  MOE_A2A_HOST_DEVICE static int num_words(const MoeConfig& config) { return 3 * (config.num_local_experts() + 1); }

  // The rest of the tables of large batches.
  MOE_A2A_DEVICE bool receive_chunks(uint64_t epoch) const {
    for (int r = 0; r < config_.num_ranks; ++r) {
      if (config_.sends_ll(num_tokens_[r])) continue;
      for (int chunk = 1 + block_.rank(); chunk < num_chunks(num_tokens_[r]); chunk += block_.size()) {
        if (!receive_chunk(args_, r, chunk, epoch)) return false;
      }
    }
    return true;
  }

  // A chunk of a small batch is a segment of it.
  MOE_A2A_DEVICE int num_chunks_of(int rank) const {
    const int num_tokens = num_tokens_[rank];
    return config_.sends_ll(num_tokens) ? ll_table_.num_segments(num_tokens) : num_chunks(num_tokens);
  }
  MOE_A2A_DEVICE int32_t count_of(int rank, int chunk, int list) const {
    return config_.sends_ll(num_tokens_[rank]) ? ll_table_.count(rank, chunk, list)
                                               : ws_.table_count(args_.buffer, rank, chunk, list);
  }

  // Adds the counts of some chunks to `sums`: all of them are read side by side, since a small batch has no time to
  // read them one after the other. The chunks are numbered rank by rank, most_chunks_ to each.
  MOE_A2A_DEVICE void add_counts(int begin, int end, int32_t* sums) const {
    for (int i = begin * num_lists() + block_.rank(); i < end * num_lists(); i += block_.size()) {
      const int list = i % num_lists(), rank = i / num_lists() / most_chunks_, chunk = i / num_lists() % most_chunks_;
      if (chunk >= num_chunks_of(rank)) continue;
      atomic_add<Order::kRelaxed, Scope::kBlock>(&sums[list], count_of(rank, chunk, list));
    }
  }

  MOE_A2A_DEVICE void add_up_chunks() {
    for (int list = block_.rank(); list < num_lists(); list += block_.size()) count_[list] = 0;
    most_chunks_ = 1;
    for (int r = 0; r < config_.num_ranks; ++r) {
      const int chunks = num_chunks_of(r);
      most_chunks_ = chunks > most_chunks_ ? chunks : most_chunks_;
    }
    block_.sync();
    add_counts(0, config_.num_ranks * most_chunks_, count_);
    block_.sync();
  }

  // Positions that an expert takes in the layout.
  MOE_A2A_DEVICE int32_t extent(int expert) const {
    if (args_.layout == Layout::kMasked) return config_.num_ranks * config_.num_max_tokens_per_rank;
    const int alignment = args_.expert_alignment;
    return (count_[expert] + alignment - 1) / alignment * alignment;
  }

  MOE_A2A_DEVICE void place_experts() {
    const int num_experts = config_.num_local_experts();
    int32_t before = 0;
    for (int first = 0; first < num_experts; first += block_.size()) {
      const int expert = first + block_.rank();
      const int32_t own = expert < num_experts ? extent(expert) : 0;
      int32_t total;
      const int32_t inclusive = block_.inclusive_sum(own, &total);
      if (expert < num_experts) start_[expert] = next_[expert] = before + inclusive - own;
      before += total;
    }
    if (block_.rank() == 0) {
      start_[num_experts] = before;
      next_[landed_list()] = 0;
    }
    block_.sync();
  }

  // Routes of an expert that the layout has room for: a masked block may overflow when tokens name an expert twice.
  MOE_A2A_DEVICE int32_t held(int expert) const {
    const int32_t room = args_.layout == Layout::kMasked ? extent(expert) : count_[expert];
    return count_[expert] < room ? count_[expert] : room;
  }

  MOE_A2A_DEVICE void publish_counts() const {
    const int num_experts = config_.num_local_experts(), b = args_.buffer;
    for (int e = block_.rank(); e <= num_experts; e += block_.size()) {
      ws_.expert_offsets(b, e) = start_[e];
      if (e < num_experts) ws_.expert_counts(b, e) = held(e);
    }
  }

  MOE_A2A_DEVICE void publish_ranks() const {
    const int b = args_.buffer;
    for (int r = block_.rank(); r < config_.num_ranks; r += block_.size()) {
      ws_.num_recv_tokens(b, r) = num_tokens_[r];
      ws_.landed_offsets(b, r) = landed_before(r);
    }
    bool all_send_ll = true;
    for (int r = 0; r < config_.num_ranks; ++r) all_send_ll &= config_.sends_ll(num_tokens_[r]);
    if (block_.rank() == 0) {
      ws_.landed_offsets(b, config_.num_ranks) = count_[landed_list()];
      ws_.all_send_ll(b, 0) = all_send_ll;
    }
  }

  // Rows that land here from the ranks before `rank`.
  MOE_A2A_DEVICE int32_t landed_before(int rank) const {
    int32_t count = 0;
    for (int r = 0; r < rank; ++r) {
      for (int chunk = 0; chunk < num_chunks_of(r); ++chunk) count += count_of(r, chunk, landed_list());
    }
    return count;
  }

  // The blocks take chunks in turn; next_ is brought up, list by list, to where the entries of the chunk begin.
  MOE_A2A_DEVICE void write_chunks() {
    int counted = 0;
    for (int i = grid_.rank(); i < config_.num_ranks * most_chunks_; i += grid_.size()) {
      const int rank = i / most_chunks_, chunk = i % most_chunks_;
      add_counts(counted, i, next_);
      counted = i;
      block_.sync();
      if (chunk < num_chunks_of(rank)) write_chunk(rank, chunk);
      block_.sync();
    }
  }

  // A thread per token.
  MOE_A2A_DEVICE void write_chunk(int rank, int chunk) const {
    if (config_.sends_ll(num_tokens_[rank])) return write_segment(rank, chunk);
    const int first = chunk * kTableChunk, rest = num_tokens_[rank] - first;
    const int end = first + (rest < kTableChunk ? rest : kTableChunk);
    for (int token = first + block_.rank(); token < end; token += block_.size()) {
      prefetch(ws_.table_route.at(args_.buffer, rank, token));
      prefetch(ws_.table_weight.at(args_.buffer, rank, token));
      const int32_t landing = ws_.table_landing(args_.buffer, rank, token);
      if (landing >= 0) write_token(rank, token, next_[landed_list()] + landing);
    }
  }

  // Calls visit(k, entry) for a token's entries in k order, read four at a time where their number allows it.
  template <class Visit>
  MOE_A2A_DEVICE void visit_entries(const RouteEntry* entries, Visit visit) const {
    constexpr int kVector = 4;
    if (config_.num_topk % kVector != 0) {
      for (int k = 0; k < config_.num_topk; ++k) visit(k, entries[k]);
      return;
    }
    for (int k = 0; k < config_.num_topk; k += kVector) {
      RouteEntry some[kVector];
      load_values(some, entries + k);
      for (int i = 0; i < kVector; ++i) visit(k + i, some[i]);
    }
  }

  MOE_A2A_DEVICE void write_token(int rank, int token, int32_t landed) const {
    const float* weights = ws_.table_weight.at(args_.buffer, rank, token);
    RouteWriter routes(*this, rank, token, landed);
    visit_entries(ws_.table_route.at(args_.buffer, rank, token), [&](int k, RouteEntry entry) {
      const int expert = entry.is_dropped() ? -1 : local_expert(config_, entry.expert());
      if (expert >= 0) routes.add(expert, entry.idx_in_chunk(), weights[k]);
    });
    routes.finish();
  }

  MOE_A2A_DEVICE void write_segment(int rank, int segment) const {
    const int32_t landed = next_[landed_list()] - (segment > 0 ? ll_table_.count(rank, 0, landed_list()) : 0);
    const int end = ll_table_.first_token(segment + 1, num_tokens_[rank]);
    for (int t = ll_table_.first_token(segment, num_tokens_[rank]) + block_.rank(); t < end; t += block_.size()) {
      const int32_t landing = ll_table_.landing(rank, t);
      if (landing < 0) continue;
      RouteWriter routes(*this, rank, t, landed + landing);
      ll_table_.visit(rank, t, [&](int expert, int idx, float weight) { routes.add(expert, idx, weight); });
      routes.finish();
    }
  }

  // Of one landed row: its routes in their experts' lists, and the terms of its sum.
  class RouteWriter {
   public:
    MOE_A2A_DEVICE RouteWriter(const ExpertLists& lists, int rank, int token, int32_t landed)
        : lists_(lists), rank_(rank), token_(token), terms_(lists.ws_.landed_term.at(lists.args_.buffer, landed)) {
      lists.ws_.landed_row(lists.args_.buffer, landed) = rank * lists.config_.num_max_tokens_per_rank + token;
    }
    MOE_A2A_DEVICE void add(int expert, int idx_in_chunk, float weight) {
      const int32_t position = lists_.next_[expert] + idx_in_chunk;
      if (position - lists_.start_[expert] >= lists_.held(expert)) {
        atomic_add<Order::kRelaxed, Scope::kDevice>(&lists_.args_.context.wait.tally->num_lost_routes, 1u);
        return;
      }
      lists_.write_route(position, rank_, token_, weight);
      terms_[num_terms_++] = {position, weight};
    }
    MOE_A2A_DEVICE void finish() const {
      if (num_terms_ < lists_.config_.num_topk) terms_[num_terms_] = {};
    }

   private:
    const ExpertLists& lists_;
    int rank_, token_;
    RouteTerm* terms_;
    int num_terms_ = 0;
  };

  MOE_A2A_DEVICE void write_route(int32_t position, int rank, int token, float weight) const {
    const int b = args_.buffer;
    ws_.expert_row_index(b, position) = rank < 0 ? -1 : rank * config_.num_max_tokens_per_rank + token;
    ws_.route_weight(b, position) = weight;
    ws_.route_src_rank(b, position) = rank;
    ws_.route_src_token(b, position) = token;
  }

  MOE_A2A_DEVICE void write_padding(int expert) const {
    const int32_t end = start_[expert] + extent(expert);
    for (int32_t p = start_[expert] + count_[expert] + block_.rank(); p < end; p += block_.size()) {
      write_route(p, -1, -1, 0);
    }
  }

  const DispatchRecvArgs& args_;
  const MoeConfig& config_;
  const Workspace& ws_;
  const Grid& grid_;
  const Block& block_;
  LlTable ll_table_;
  int32_t* num_tokens_;
  int32_t* count_;       // [num_lists]  entries of each list
  int32_t* start_;       // [num_lists]  first position of each expert in the layout; last: of all
  int32_t* next_;        // [num_lists]  where the entries of the chunk at hand begin
  int most_chunks_ = 1;  // of a rank
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
