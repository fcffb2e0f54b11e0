// Builds the expert lists from the routing tables of all ranks: which rows each local expert works on.
//
// A list holds one local expert's routes in (source rank, token, choice) order; one more list holds the landed rows.
// Every entry carries its index within its chunk or segment, so only a prefix sum over chunks and segments remains.
// Each block that has something to write computes it, then writes the entries of its chunks and tokens in any order.
#pragma once

#include "moe/route/ll_table.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

class ExpertLists {
 public:
  struct Plan {
    SharedPart<int32_t> count, start;  // [num_lists]
    SharedPart<int32_t> next;          // [kChunksAtOnce, num_lists]
    SharedPart<int32_t> before_rank;   // [num_ranks, num_lists]
    LlTable::Plan ll_table;
    int bytes = 0;
  };
  // Placed after `offset` bytes of other use.
  MOE_A2A_HOST_DEVICE static Plan plan(const MoeConfig& config, int offset = 0) {
    const int num_lists = config.num_local_experts + 1;
    SharedCarver carver(offset);
    Plan plan;
    plan.count = carver.take<int32_t>(num_lists);
    plan.start = carver.take<int32_t>(num_lists);
    plan.next = carver.take<int32_t>(kChunksAtOnce * num_lists);
    plan.before_rank = carver.take<int32_t>(config.num_ranks * num_lists);
    plan.ll_table = LlTable::plan(config, carver);
    plan.bytes = carver.bytes();
    return plan;
  }

  // `num_tokens` [num_ranks]: this warp's, in shared memory.
  MOE_A2A_DEVICE ExpertLists(const DispatchRecvArgs& args, const Grid& grid, const Block& block, std::byte* shared,
                             const Plan& plan, int32_t* num_tokens)
      : args_(args),
        config_(args.context.config),
        region_(args.context.region),
        grid_(grid),
        block_(block),
        chunk_table_(args),
        ll_table_(args.context, args.buffer, block, shared, plan.ll_table),
        routes_{region_.expert_row_index.at(args.buffer), region_.route_weights.at(args.buffer),
                region_.route_src_rank.at(args.buffer), region_.route_src_token_idx.at(args.buffer)},
        num_tokens_(num_tokens),
        count_(plan.count.in(shared)),
        start_(plan.start.in(shared)),
        next_(plan.next.in(shared)),
        before_rank_(plan.before_rank.in(shared)) {}

  // More blocks do not speed up the lists of small batches: seven for the tokens, two for the rest.
  static constexpr int kBlocksOfUse = 9;
  // Chunks of a large batch that a block handles side by side: it has few, and each alone costs three dependent loads.
  static constexpr int kChunksAtOnce = kBlockThreads > 1 ? 4 : 1;

  // False if a wait gave up. `receive_headers`, called by every warp, fills its num_tokens.
  template <class ReceiveHeaders>
  MOE_A2A_DEVICE bool build(uint64_t epoch, ReceiveHeaders receive_headers) {
    ll_table_.clear();
    block_.sync();
    bool good = receive_headers();
    MOE_A2A_ROLLED
    for (int r = 0; good && r < config_.num_ranks; ++r) {
      chunk_table_.expect(num_tokens_[r]);
      ll_table_.expect(num_tokens_[r]);
    }
    good = good && chunk_table_.receive(block_, num_tokens_, epoch) && ll_table_.receive(num_tokens_, epoch);
    if (block_.any(!good)) return false;
    ll_table_.count(num_tokens_);
    block_.sync();
    place_lists();
    write_small_batches();
    write_chunks();
    // By the last two blocks, which had the least to write.
    const int last = grid_.size() - 1;
    if (grid_.rank() == last) publish_counts();
    if (grid_.rank() == (last > 0 ? last - 1 : 0)) publish_ranks();
    if (args_.layout == Layout::kExpertMajor) {
      for (int e = grid_.rank(); e < config_.num_local_experts; e += grid_.size()) write_padding(e);
    }
    return true;
  }

 private:
  MOE_A2A_DEVICE int num_lists() const { return config_.num_local_experts + 1; }
  MOE_A2A_DEVICE int landed_list() const { return config_.num_local_experts; }
  MOE_A2A_DEVICE int32_t& before_rank(int rank, int list) const { return before_rank_[rank * num_lists() + list]; }

  // ---- where everything begins

  // Sets before_rank to the number of entries in each list from that rank, if its batch is a large one. A thread per
  // rank and list: the loads of all ranks are in flight at once.
  MOE_A2A_DEVICE void count_chunks() const {
    MOE_A2A_ROLLED
    for (int i = block_.rank(); i < config_.num_ranks * num_lists(); i += block_.size()) {
      const int rank = i / num_lists(), list = i - rank * num_lists(), num_tokens = num_tokens_[rank];
      if (chunk_table_.has(num_tokens)) before_rank_[i] = chunk_table_.sum(rank, list, 0, num_chunks(num_tokens));
    }
    block_.sync();
  }
  // The number of entries in a list. Sets before_rank to the number from lower ranks.
  MOE_A2A_DEVICE int32_t add_up(int list) const {
    int32_t sum = 0;
    MOE_A2A_ROLLED
    for (int r = 0; r < config_.num_ranks; ++r) {
      int32_t& before = before_rank(r, list);
      const int32_t in_chunks = chunk_table_.is_used() && chunk_table_.has(num_tokens_[r]) ? before : 0;
      before = sum;
      if (ll_table_.is_used()) sum += ll_table_.sum(r, list, sum);
      sum += in_chunks;
    }
    return sum;
  }

  // How many positions an expert takes in the layout.
  MOE_A2A_DEVICE int32_t extent(int expert) const {
    if (args_.layout == Layout::kMasked) return config_.num_ranks * config_.num_max_tokens_per_rank;
    const int alignment = args_.expert_alignment;
    if (alignment == 1) return count_[expert];
    return (count_[expert] + alignment - 1) / alignment * alignment;
  }

  // One thread adds up each list; then one warp lays out the experts' positions one after another. The last list, the
  // landed rows, begins where they end. (cub::BlockScan would cost each of 16 warps 93 instructions, a round of this 29
  // in one warp: 64 experts take two.)
  MOE_A2A_DEVICE void place_lists() {
    if (chunk_table_.is_used()) count_chunks();
    MOE_A2A_ROLLED
    for (int list = block_.rank(); list < num_lists(); list += block_.size()) count_[list] = add_up(list);
    block_.sync();
    const Warp warp = block_.warp();
    int32_t before = 0;
    MOE_A2A_ROLLED
    for (int first = 0; block_.warp_rank() == 0 && first < landed_list(); first += warp.size()) {
      const int list = first + warp.rank();
      const int32_t own = list < landed_list() ? extent(list) : 0, inclusive = warp.inclusive_sum(own);
      if (list < landed_list()) start_[list] = before + inclusive - own;
      before += warp.last(inclusive);
    }
    if (block_.rank() == 0) start_[landed_list()] = before;
    block_.sync();
  }

  // ---- what is published once

  // How many of an expert's routes fit in the layout: a masked block overflows if tokens choose an expert twice.
  MOE_A2A_DEVICE int32_t held(int expert) const {
    return can_overflow() && count_[expert] > extent(expert) ? extent(expert) : count_[expert];
  }

  MOE_A2A_DEVICE void publish_counts() const {
    const int num_experts = config_.num_local_experts, b = args_.buffer;
    MOE_A2A_ROLLED
    for (int e = block_.rank(); e <= num_experts; e += block_.size()) {
      region_.expert_offsets(b, e) = start_[e];
      if (e < num_experts) region_.expert_counts(b, e) = held(e);
    }
  }

  MOE_A2A_DEVICE void publish_ranks() const {
    const int b = args_.buffer;
    MOE_A2A_ROLLED
    for (int r = block_.rank(); r < config_.num_ranks; r += block_.size()) {
      region_.num_recv_tokens_per_rank(b, r) = num_tokens_[r];
      region_.landed_offsets(b, r) = before_rank(r, landed_list());
    }
    if (block_.rank() == 0) {
      region_.landed_offsets(b, config_.num_ranks) = count_[landed_list()];
      region_.sums_return_ll(b) = ll_table_.sums_return_ll();
    }
  }

  // ---- the entries

  // The tokens of all small and medium batches, round-robin over the blocks. If there are more than two, the last two
  // are left to publish_counts() and publish_ranks().
  MOE_A2A_DEVICE void write_small_batches() const {
    const int num_blocks = grid_.size() > 2 ? grid_.size() - 2 : grid_.size();
    if (grid_.rank() >= num_blocks) return;
    const ChoiceThreads& threads = ll_table_.threads();
    const int first = grid_.rank() + num_blocks * threads.token, stride = num_blocks * threads.num_tokens;
    ll_table_.walk_tokens(num_tokens_, first, stride, [&](int rank, int token) {
      const int32_t* before = ll_table_.counts_of(rank, token >> ll_table_.segment_shift());
      write_token(LlTable::Token(ll_table_, rank, token), rank, token, before,
                  [&](int expert) { return start_[expert] + before[expert]; });
      return true;
    });
  }

  // The chunks of all large batches, round-robin over the blocks. A block takes several at a time, each by a part of
  // its threads; next_ holds where each chunk's entries begin.
  MOE_A2A_DEVICE void write_chunks() const {
    const int num_threads = block_.size() / kChunksAtOnce, part = block_.rank() / num_threads;
    const int thread = block_.rank() - part * num_threads, stride = kChunksAtOnce * grid_.size();
    int32_t* next = next_ + part * num_lists();
    int total = 0;
    MOE_A2A_ROLLED
    for (int r = 0; r < config_.num_ranks; ++r) total += chunks_of(r);
    MOE_A2A_ROLLED
    for (int first = grid_.rank(); first < total; first += stride) {
      int rank = 0, chunk = first + part * grid_.size();
      const bool has_one = chunk < total;
      MOE_A2A_ROLLED
      for (; has_one && chunk >= chunks_of(rank); ++rank) chunk -= chunks_of(rank);
      MOE_A2A_ROLLED
      for (int list = thread; has_one && list < num_lists(); list += num_threads) {
        next[list] = before_rank(rank, list) + (list < landed_list() ? start_[list] : 0) +
                     chunk_table_.sum(rank, list, 0, chunk);
      }
      block_.sync();
      if (has_one) write_chunk(rank, chunk, thread, num_threads, next);
      block_.sync();
    }
  }
  MOE_A2A_DEVICE int chunks_of(int rank) const {
    return chunk_table_.has(num_tokens_[rank]) ? num_chunks(num_tokens_[rank]) : 0;
  }
  // A thread per token, or two if a chunk has so few.
  MOE_A2A_DEVICE void write_chunk(int rank, int chunk, int thread, int num_threads, const int32_t* next) const {
    const int length = chunk_length(num_tokens_[rank]), first = chunk * length, rest = num_tokens_[rank] - first;
    const int end = first + (rest < length ? rest : length), log2 = num_threads >= 2 * length ? 1 : 0;
    const int turn = thread & ((1 << log2) - 1);
    for (int token = first + (thread >> log2); token < end; token += num_threads >> log2) {
      write_token(ChunkTable::Token(args_, rank, token, turn, 1 << log2), rank, token, next,
                  [&](int expert) { return next[expert]; });
    }
  }

  // Writes a token's routes and terms: by one thread, or by several that share its choices and count the terms before
  // their own. `before` and `first_position_of` tell where the lists of the token's chunk or segment begin.
  template <class Token, class FirstPositionOf>
  MOE_A2A_DEVICE void write_token(const Token& entry, int rank, int token, const int32_t* before,
                                  const FirstPositionOf& first_position_of) const {
    if (entry.landed_idx() < 0) return;
    const int32_t row = rank * config_.num_max_tokens_per_rank + token;
    const auto position_of = [&](LocalChoice choice) { return first_position_of(choice.expert) + choice.idx; };
    const auto has_route = [&](LocalChoice choice) {
      return choice.expert >= 0 && (!can_overflow() || has_room_for(choice.expert, position_of(choice)));
    };
    if (entry.is_leader()) write_landed(before[landed_list()] + entry.landed_idx(), rank, row);
    RouteTerm* terms = region_.landed_term.at(args_.buffer, row);
    int num_terms = 0, counted = 0;  // the terms of the first `counted` choices
    entry.visit_choices([&](int k, LocalChoice choice) {
      MOE_A2A_ROLLED
      for (; counted < k; ++counted) num_terms += has_route(entry.choice(counted));
      ++counted;
      if (has_route(choice)) {
        const int32_t position = position_of(choice);
        const float weight = entry.weight(k);
        write_route(position, rank, token, weight);
        terms[num_terms++] = {position, weight};
      } else if (choice.expert >= 0) {
        count_lost_route();
      }
      if (k + 1 == config_.num_topk && num_terms < config_.num_topk) terms[num_terms] = {};
    });
  }

  // Only a masked block can; lost routes are raised by the next raise_reported().
  MOE_A2A_DEVICE bool can_overflow() const { return args_.layout == Layout::kMasked; }
  MOE_A2A_DEVICE bool has_room_for(int expert, int32_t position) const {
    return position - start_[expert] < extent(expert);
  }
  MOE_A2A_DEVICE void count_lost_route() const {
    atomic_add<Order::kRelaxed, Scope::kDevice>(&args_.context.region.errors.data->num_lost_routes, 1u);
  }

  MOE_A2A_DEVICE void write_landed(int32_t landed, int rank, int32_t row) const {
    region_.landed_row(args_.buffer, landed) = row;
    if (!ll_table_.sums_return_ll()) write_combine_order(landed, rank, row);
  }

  // Inserts a landed row into the order in which combine sends whole rows: owners take turns, starting after this rank,
  // as long as they have rows left. So no rank is the target of all at once, and each gets its rows in the order in
  // which it waits for them.
  MOE_A2A_DEVICE void write_combine_order(int32_t landed, int rank, int32_t row) const {
    const int own_rank = config_.rank, num_ranks = config_.num_ranks;
    const int32_t i = landed - before_rank(rank, landed_list());
    const auto turn_of = [&](int r) { return r > own_rank ? r - own_rank : r - own_rank + num_ranks; };
    int32_t before = 0, own_before = 0;  // rows of all ranks, and of this one
    MOE_A2A_ROLLED
    for (int r = 0; r < num_ranks; ++r) {
      const int32_t end = r + 1 < num_ranks ? before_rank(r + 1, landed_list()) : count_[landed_list()];
      const int32_t rows = end - before_rank(r, landed_list()), full_turns = rows < i ? rows : i;
      before += full_turns + (rows > i && turn_of(r) < turn_of(rank));
      if (r == own_rank) own_before = full_turns;
    }
    region_.combine_order(args_.buffer, MoeRegion::kAllRows, before) = row;
    if (rank != own_rank) region_.combine_order(args_.buffer, MoeRegion::kPeersRows, before - own_before) = row;
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
  const MoeRegion& region_;
  const Grid& grid_;
  const Block& block_;
  ChunkTable chunk_table_;
  LlTable ll_table_;
  struct {
    int32_t* row;
    float* weight;
    int32_t *src_rank, *src_token;
  } routes_;  // [positions]
  int32_t* num_tokens_;
  int32_t* count_;        // [num_lists]  entries of each list
  int32_t* start_;        // [num_lists]  first position of each expert in the layout; last: the total
  int32_t* next_;         // [kChunksAtOnce, num_lists]  where the entries of the current chunks begin
  int32_t* before_rank_;  // [num_ranks, num_lists]  entries from lower ranks
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
