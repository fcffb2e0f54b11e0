// Which rows each local expert works on: lists of positions, put together from the routing tables of all ranks.
//
// A list is one local expert's routes in (source rank, token, choice) order; one more list holds the landed rows. The
// tables carry each entry's place within its chunk and each chunk's counts (those of small batches are counted here,
// segment by segment, see ll_table.h), so a prefix sum over the chunks is all that is left: every block that has
// something to write makes it for itself and then writes the entries of its chunks and small batches, in any order.
#pragma once

#include "moe/route/ll_table.h"
#include "moe/route/route.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// Waits for a chunk of a large batch's table. Pairs with the signal in routing_table.h.
MOE_A2A_DEVICE bool receive_chunk(const DispatchRecvArgs& args, int rank, int chunk, int num_tokens, uint64_t epoch) {
  const Context& c = args.context;
  const WaitSite site{moe_op::kDispatchRecv, moe_kind::kTableWait, rank, chunk * chunk_length(num_tokens)};
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
        routes_{ws_.expert_row_index.at(args.buffer), ws_.route_weight.at(args.buffer),
                ws_.route_src_rank.at(args.buffer), ws_.route_src_token.at(args.buffer)},
        num_tokens_(num_tokens) {
    count_ = reinterpret_cast<int32_t*>(shared);
    start_ = count_ + num_lists();
    next_ = start_ + num_lists();
    before_rank_ = next_ + num_lists();
  }

  // More are of no use for writing the lists of small batches: seven for the tokens, and two for the rest.
  static constexpr int kBlocksOfUse = 9;

  // False when a wait was given up. `receive_headers`, called by every warp, fills its num_tokens.
  template <class ReceiveHeaders>
  MOE_A2A_DEVICE bool build(uint64_t epoch, ReceiveHeaders receive_headers) {
    ll_table_.clear();
    block_.sync();
    const bool good = receive_headers() && receive_chunks(epoch) && ll_table_.receive(num_tokens_, epoch);
    if (block_.any(!good)) return false;
    ll_table_.count(num_tokens_);
    block_.sync();
    place_lists();
    write_small_batches();
    write_chunks();
    // Blocks that have had less to write than others, or nothing.
    const int last = grid_.size() - 1;
    if (grid_.rank() == last) publish_counts();
    if (grid_.rank() == (last > 0 ? last - 1 : 0)) publish_ranks();
    if (args_.layout == Layout::kExpertMajor) {
      for (int e = grid_.rank(); e < config_.num_local_experts(); e += grid_.size()) write_padding(e);
    }
    return true;
  }

 private:
  MOE_A2A_DEVICE int num_lists() const { return config_.num_local_experts() + 1; }
  MOE_A2A_DEVICE int landed_list() const { return config_.num_local_experts(); }
  MOE_A2A_HOST_DEVICE static int num_words(const MoeConfig& config) {
    return (3 + config.num_ranks) * (config.num_local_experts() + 1);
  }

  // The rest of the tables of large batches.
  MOE_A2A_DEVICE bool receive_chunks(uint64_t epoch) const {
    for (int r = 0; r < config_.num_ranks; ++r) {
      if (config_.sends_ll(num_tokens_[r])) continue;
      for (int chunk = 1 + block_.rank(); chunk < num_chunks(num_tokens_[r]); chunk += block_.size()) {
        if (!receive_chunk(args_, r, chunk, num_tokens_[r], epoch)) return false;
      }
    }
    return true;
  }

  // The entries of a list in some chunks of a large batch's table. Several counts are read side by side.
  MOE_A2A_DEVICE int32_t sum_of_chunks(int rank, int list, int begin, int end) const {
    constexpr int kUnroll = kBlockThreads > 1 ? 8 : 1;
    const int32_t* counts = ws_.table_count.at(args_.buffer, rank, 0, list);
    int32_t sum = 0;
    MOE_A2A_ROLLED
    for (int first = begin; first < end; first += kUnroll) {
      int32_t count[kUnroll];
      MOE_A2A_UNROLL
      for (int u = 0; u < kUnroll; ++u) count[u] = first + u < end ? counts[(first + u) * num_lists()] : 0;
      MOE_A2A_UNROLL
      for (int u = 0; u < kUnroll; ++u) sum += count[u];
    }
    return sum;
  }

  // The same of all segments of a small batch. In the place of each count it leaves how many entries are before the
  // segment, `before` of them of other ranks.
  MOE_A2A_DEVICE int32_t sum_of_segments(int rank, int list, int32_t before) const {
    int32_t sum = 0;
    int32_t* counts = ll_table_.counts_of(rank, 0) + list;
    MOE_A2A_ROLLED
    for (int left = ll_table_.num_segments(num_tokens_[rank]); left > 0; --left, counts += num_lists()) {
      const int32_t count = *counts;
      *counts = before + sum;
      sum += count;
    }
    return sum;
  }

  // How many entries a list has. Leaves in before_rank_ how many are of lower ranks than each.
  MOE_A2A_DEVICE int32_t add_up(int list) const {
    int32_t sum = 0;
    MOE_A2A_ROLLED
    for (int r = 0; r < config_.num_ranks; ++r) {
      before_rank_[r * num_lists() + list] = sum;
      sum += config_.sends_ll(num_tokens_[r]) ? sum_of_segments(r, list, sum)
                                              : sum_of_chunks(r, list, 0, num_chunks(num_tokens_[r]));
    }
    return sum;
  }

  // Positions that an expert takes in the layout.
  MOE_A2A_DEVICE int32_t extent(int expert) const {
    if (args_.layout == Layout::kMasked) return config_.num_ranks * config_.num_max_tokens_per_rank;
    const int alignment = args_.expert_alignment;
    if (alignment == 1) return count_[expert];
    return (count_[expert] + alignment - 1) / alignment * alignment;
  }

  // A thread adds up each list; then a warp lays the experts' on one line. The landed rows, the last list, take no
  // positions.
  MOE_A2A_DEVICE void place_lists() {
    MOE_A2A_ROLLED
    for (int list = block_.rank(); list < num_lists(); list += block_.size()) count_[list] = add_up(list);
    block_.sync();
    const Warp warp = block_.warp();
    int32_t before = 0;
    MOE_A2A_ROLLED
    for (int first = 0; block_.warp_rank() == 0 && first < num_lists(); first += warp.size()) {
      const int list = first + warp.rank();
      const int32_t own = list < landed_list() ? extent(list) : 0, inclusive = warp.inclusive_sum(own);
      if (list < num_lists()) start_[list] = before + inclusive - own;
      before += warp.last(inclusive);
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
    MOE_A2A_ROLLED
    for (int e = block_.rank(); e <= num_experts; e += block_.size()) {
      ws_.expert_offsets(b, e) = start_[e];
      if (e < num_experts) ws_.expert_counts(b, e) = held(e);
    }
  }

  MOE_A2A_DEVICE void publish_ranks() const {
    const int b = args_.buffer;
    MOE_A2A_ROLLED
    for (int r = block_.rank(); r < config_.num_ranks; r += block_.size()) {
      ws_.num_recv_tokens(b, r) = num_tokens_[r];
      ws_.landed_offsets(b, r) = before_rank_[r * num_lists() + landed_list()];
    }
    bool all_send_ll = true;
    MOE_A2A_ROLLED
    for (int r = 0; r < config_.num_ranks; ++r) all_send_ll &= config_.sends_ll(num_tokens_[r]);
    if (block_.rank() == 0) {
      ws_.landed_offsets(b, config_.num_ranks) = count_[landed_list()];
      ws_.all_send_ll(b, 0) = all_send_ll;
    }
  }

  // The tokens of all small batches lie on one line, dealt out to the blocks in turn. Of many blocks the last two have
  // other things to write.
  MOE_A2A_DEVICE void write_small_batches() const {
    const int num_blocks = grid_.size() > 2 ? grid_.size() - 2 : grid_.size();
    if (grid_.rank() >= num_blocks) return;
    const ChoiceThreads& threads = ll_table_.threads();
    int token = grid_.rank() + num_blocks * threads.token;
    MOE_A2A_ROLLED
    for (int r = 0; r < config_.num_ranks; ++r) {
      if (!config_.sends_ll(num_tokens_[r])) continue;
      MOE_A2A_ROLLED
      for (; token < num_tokens_[r]; token += num_blocks * threads.num_tokens) write_small_token(r, token);
      token -= num_tokens_[r];
    }
  }

  // By a thread for each choice, which counts the terms before its own.
  MOE_A2A_DEVICE void write_small_token(int rank, int token) const {
    const int32_t landing = ll_table_.landing(rank, token);
    if (landing < 0) return;
    const int32_t* before = ll_table_.counts_of(rank, token >> ll_table_.segment_shift(num_tokens_[rank]));
    const int32_t landed = before[landed_list()] + landing;
    // The position of a choice; -1: it has none.
    const auto position_of = [&](int k) {
      const LocalChoice choice = ll_table_.choice(rank, token, k);
      if (choice.expert < 0) return -1;
      const int32_t position = start_[choice.expert] + before[choice.expert] + choice.idx;
      return has_room_for(choice.expert, position) ? position : -1;
    };
    const ChoiceThreads& threads = ll_table_.threads();
    if (threads.k == 0) write_landed(landed, rank, token);
    RouteTerm* terms = ws_.landed_term.at(args_.buffer, landed);
    MOE_A2A_ROLLED
    for (int k = threads.k; k < config_.num_topk; k += threads.per_token) {
      int num_terms = 0;
      MOE_A2A_ROLLED
      for (int i = 0; i < k; ++i) num_terms += position_of(i) >= 0;
      const int32_t position = position_of(k);
      if (position >= 0) {
        const float weight = ll_table_.weight(rank, token, k);
        write_route(position, rank, token, weight);
        terms[num_terms++] = {position, weight};
      } else if (ll_table_.choice(rank, token, k).expert >= 0) {
        count_lost_route();
      }
      if (k + 1 == config_.num_topk && num_terms < config_.num_topk) terms[num_terms] = {};
    }
  }

  // The chunks of all large batches lie on one line, along which the blocks go side by side.
  MOE_A2A_DEVICE void write_chunks() const {
    int chunk = grid_.rank();
    for (int r = 0; r < config_.num_ranks; ++r) {
      if (config_.sends_ll(num_tokens_[r])) continue;
      const int chunks = num_chunks(num_tokens_[r]);
      if (chunk < chunks) begin_rank(r);
      for (int before = 0; chunk < chunks; before = chunk, chunk += grid_.size()) {
        skip_chunks(r, before, chunk);
        write_chunk(r, chunk);
      }
      chunk -= chunks;
    }
  }

  // next_: where the entries of the chunk at hand begin. A thread sees to the same lists here and there.
  MOE_A2A_DEVICE void begin_rank(int rank) const {
    MOE_A2A_ROLLED
    for (int list = block_.rank(); list < num_lists(); list += block_.size()) {
      next_[list] = before_rank_[rank * num_lists() + list] + (list < landed_list() ? start_[list] : 0);
    }
  }
  MOE_A2A_DEVICE void skip_chunks(int rank, int begin, int end) const {
    MOE_A2A_ROLLED
    for (int list = block_.rank(); list < num_lists(); list += block_.size()) {
      next_[list] += sum_of_chunks(rank, list, begin, end);
    }
    block_.sync();
  }

  // A thread per token: a chunk has many of them.
  MOE_A2A_DEVICE void write_chunk(int rank, int chunk) const {
    const int length = chunk_length(num_tokens_[rank]), first = chunk * length, rest = num_tokens_[rank] - first;
    const int end = first + (rest < length ? rest : length);
    for (int token = first + block_.rank(); token < end; token += block_.size()) write_token(rank, token);
    block_.sync();
  }

  MOE_A2A_DEVICE void write_token(int rank, int token) const {
    const RouteEntry* entries = ws_.table_route.at(args_.buffer, rank, token);
    const float* weights = ws_.table_weight.at(args_.buffer, rank, token);
    prefetch(entries);
    prefetch(weights);
    const int32_t landing = ws_.table_landing(args_.buffer, rank, token);
    if (landing < 0) return;
    const int32_t landed = next_[landed_list()] + landing;
    write_landed(landed, rank, token);
    RouteTerm* terms = ws_.landed_term.at(args_.buffer, landed);
    int num_terms = 0;
    visit_entries(entries, [&](int k, RouteEntry entry) {
      const int expert = entry.is_dropped() ? -1 : local_expert(config_, entry.expert());
      if (expert < 0) return;
      const int32_t position = next_[expert] + entry.idx_in_chunk();
      if (!has_room_for(expert, position)) return count_lost_route();
      write_route(position, rank, token, weights[k]);
      terms[num_terms++] = {position, weights[k]};
    });
    if (num_terms < config_.num_topk) terms[num_terms] = {};
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

  // Only a masked block may overflow; a lost route is raised at the next call that looks.
  MOE_A2A_DEVICE bool has_room_for(int expert, int32_t position) const {
    return args_.layout != Layout::kMasked || position - start_[expert] < extent(expert);
  }
  MOE_A2A_DEVICE void count_lost_route() const {
    atomic_add<Order::kRelaxed, Scope::kDevice>(&args_.context.ws.errors.data->num_lost_routes, 1u);
  }

  MOE_A2A_DEVICE void write_landed(int32_t landed, int rank, int token) const {
    ws_.landed_row(args_.buffer, landed) = rank * config_.num_max_tokens_per_rank + token;
  }
  MOE_A2A_DEVICE void write_route(int32_t position, int rank, int token, float weight) const {
    routes_.row[position] = rank < 0 ? -1 : rank * config_.num_max_tokens_per_rank + token;
    routes_.weight[position] = weight;
    routes_.src_rank[position] = rank;
    routes_.src_token[position] = token;
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
  struct {
    int32_t* row;
    float* weight;
    int32_t *src_rank, *src_token;
  } routes_;  // [positions]
  int32_t* num_tokens_;
  int32_t* count_;        // [num_lists]  entries of each list
  int32_t* start_;        // [num_lists]  first position of each expert in the layout; last: of all
  int32_t* next_;         // [num_lists]  where the entries of the chunk at hand begin
  int32_t* before_rank_;  // [num_ranks, num_lists]  entries of lower ranks
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
