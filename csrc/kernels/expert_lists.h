// Which rows each local expert works on: lists of positions, built from the routing tables by counting.
//
// A list is one local expert's routes in (source rank, token, choice) order; one more list holds the landed rows. Every
// block counts all lists, so that it knows all offsets, and writes a range of lists of its own. Inside a block each
// thread has a contiguous piece of the tokens; its count per list and a prefix sum over the threads give it the first
// position of its piece in each list. No sort, no order left to chance: the same tables give the same lists.
#pragma once

#include "kernels/route.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// The tokens of all ranks on one line: unit u is token `token` of `rank`. Walks forward from any start.
struct TokenLine {
  const int32_t* num_tokens;  // [num_ranks]
  int rank = 0;
  int token = 0;

  MOE_A2A_DEVICE TokenLine(const int32_t* num_tokens, int64_t start) : num_tokens(num_tokens) { skip(start); }
  MOE_A2A_DEVICE void skip(int64_t count) {
    int64_t position = token + count;
    while (position >= num_tokens[rank]) position -= num_tokens[rank++];
    token = static_cast<int>(position);
  }
};

class ExpertLists {
 public:
  // Counters that threads of a block keep for the lists of one pass: all lists on the CPU, 8 at a time for 512 threads.
  static constexpr int kNumCounters = 4096;
  static constexpr int kListsPerPass = kNumCounters / kBlockThreads;

  MOE_A2A_HOST_DEVICE static size_t shared_bytes(const MoeConfig& config) {
    return sizeof(int32_t) * (kNumCounters + 2 * (config.num_local_experts() + 1) + config.num_ranks);
  }

  // `num_tokens` [num_ranks] is in shared memory, behind what this object uses of it.
  MOE_A2A_DEVICE ExpertLists(const DispatchRecvArgs& args, const Grid& grid, const Block& block, std::byte* shared)
      : args_(args), config_(args.context.config), ws_(args.context.ws), grid_(grid), block_(block) {
    counters_ = reinterpret_cast<int32_t*>(shared);
    count_ = counters_ + kNumCounters;
    start_ = count_ + config_.num_local_experts() + 1;
    num_tokens_ = start_ + config_.num_local_experts() + 1;
  }

  MOE_A2A_DEVICE int32_t* num_tokens() const { return num_tokens_; }
  MOE_A2A_DEVICE int64_t line_length() const {
    int64_t length = 0;
    for (int r = 0; r < config_.num_ranks; ++r) length += num_tokens_[r];
    return length;
  }

  MOE_A2A_DEVICE void build() {
    const int num_lists = config_.num_local_experts() + 1;
    const int begin = static_cast<int>(int64_t{num_lists} * grid_.rank() / grid_.size());
    const int end = static_cast<int>(int64_t{num_lists} * (grid_.rank() + 1) / grid_.size());
    for (int first = begin; first < end || first == begin; first += kListsPerPass) {
      const int pass_end = end < first + kListsPerPass ? end : first + kListsPerPass;
      count(first, pass_end, first == begin);
      if (first == begin) place_all();
      write_lists(first, pass_end);
    }
    if (grid_.rank() == 0) publish_counts();
  }

 private:
  // Calls visit(list, rank, token, k) for the entries of a token: one per local route, then one in the landed list.
  template <class Visit>
  MOE_A2A_DEVICE void visit_token(int rank, int token, Visit visit) const {
    const int32_t* choices = ws_.table_idx.at(args_.buffer, rank, token);
    bool landed = false;
    visit_choices(config_, choices, [&](int k, int32_t choice) {
      const int expert = local_expert(config_, choice, config_.rank);
      if (expert < 0) return;
      landed = true;
      visit(expert, rank, token, k);
    });
    if (landed) visit(config_.num_local_experts(), rank, token, 0);
  }

  // The same over this thread's piece of the line.
  template <class Visit>
  MOE_A2A_DEVICE void visit_piece(Visit visit) const {
    const int64_t length = line_length();
    const int64_t piece = (length + block_.size() - 1) / block_.size();
    const int64_t begin = piece * block_.rank();
    const int64_t end = begin + piece < length ? begin + piece : length;
    if (begin >= end) return;
    TokenLine at(num_tokens_, begin);
    for (int64_t u = begin; u < end; ++u) {
      visit_token(at.rank, at.token, visit);
      if (u + 1 < end) at.skip(1);
    }
  }

  // Each thread's entries in the lists [first, end); with `all`, also the block's entries in every list.
  MOE_A2A_DEVICE void count(int first, int end, bool all) {
    const int me = block_.rank(), threads = block_.size();
    block_.sync();  // the counters of the pass before are no longer read
    for (int list = first; list < end; ++list) counters_[(list - first) * threads + me] = 0;
    if (all) {
      for (int list = me; list <= config_.num_local_experts(); list += threads) count_[list] = 0;
    }
    block_.sync();
    visit_piece([&](int list, int, int, int) {
      if (all) atomic_add<Order::kRelaxed, Scope::kBlock>(&count_[list], 1);
      if (list >= first && list < end) ++counters_[(list - first) * threads + me];
    });
    block_.sync();
    const Warp warp = block_.warp();
    for (int list = first + block_.warp_rank(); list < end; list += block_.num_warps()) {
      sum_over_threads(warp, counters_ + (list - first) * threads);
    }
    block_.sync();
  }

  // Replaces each thread's count by the sum of those before it: the position of its first entry in the list.
  MOE_A2A_DEVICE void sum_over_threads(const Warp& warp, int32_t* counts) const {
    const int piece = block_.size() / warp.size();
    int32_t* mine = counts + warp.rank() * piece;
    int32_t own = 0;
    for (int i = 0; i < piece; ++i) own += mine[i];
    int32_t before = warp.inclusive_sum(own) - own;
    for (int i = 0; i < piece; ++i) {
      const int32_t count = mine[i];
      mine[i] = before;
      before += count;
    }
  }

  // Positions that an expert takes in the layout.
  MOE_A2A_DEVICE int32_t extent(int expert) const {
    if (args_.layout == Layout::kMasked) return config_.num_ranks * config_.num_max_tokens_per_rank;
    const int alignment = args_.expert_alignment;
    return (count_[expert] + alignment - 1) / alignment * alignment;
  }

  MOE_A2A_DEVICE void place_all() {
    const int num_experts = config_.num_local_experts();
    int32_t before = 0;
    for (int first = 0; first < num_experts; first += block_.size()) {
      const int expert = first + block_.rank();
      const int32_t own = expert < num_experts ? extent(expert) : 0;
      int32_t total;
      const int32_t inclusive = block_.inclusive_sum(own, &total);
      if (expert < num_experts) start_[expert] = before + inclusive - own;
      before += total;
    }
    if (block_.rank() == 0) start_[num_experts] = before;
    block_.sync();
  }

  MOE_A2A_DEVICE void publish_counts() const {
    const int num_experts = config_.num_local_experts();
    for (int e = block_.rank(); e <= num_experts; e += block_.size()) {
      ws_.expert_offsets(args_.buffer, e) = start_[e];
      if (e < num_experts) ws_.expert_counts(args_.buffer, e) = held(e);
    }
    for (int r = block_.rank(); r < config_.num_ranks; r += block_.size()) {
      ws_.num_recv_tokens(args_.buffer, r) = num_tokens_[r];
    }
    if (block_.rank() == 0) ws_.num_landed_rows(args_.buffer, 0) = count_[num_experts];
  }

  // Routes of an expert that the layout has room for: a masked block may overflow when tokens name an expert twice.
  MOE_A2A_DEVICE int32_t held(int expert) const {
    const int32_t room = args_.layout == Layout::kMasked ? extent(expert) : count_[expert];
    return count_[expert] < room ? count_[expert] : room;
  }

  // Writes lists [first, end), at most kListsPerPass of them.
  MOE_A2A_DEVICE void write_lists(int first, int end) {
    const int me = block_.rank(), threads = block_.size();
    visit_piece([&](int list, int rank, int token, int k) {
      if (list < first || list >= end) return;
      const int32_t entry = counters_[(list - first) * threads + me]++;
      if (list == config_.num_local_experts()) {
        ws_.landed_row(args_.buffer, entry) = rank * config_.num_max_tokens_per_rank + token;
      } else {
        write_route(list, entry, rank, token, k);
      }
    });
    if (args_.layout == Layout::kExpertMajor) {
      for (int list = first; list < end && list < config_.num_local_experts(); ++list) write_padding(list);
    }
  }

  MOE_A2A_DEVICE void write_route(int expert, int32_t entry, int rank, int token, int k) const {
    const int b = args_.buffer;
    const int32_t row = rank * config_.num_max_tokens_per_rank + token;
    if (entry >= held(expert)) {
      ws_.row_route(b, row, k) = -1;
      const WaitPolicy& wait = args_.context.wait;
      count_fault(&wait.tally->num_lost_routes, &wait.report->num_lost_routes);
      return;
    }
    const int32_t position = start_[expert] + entry;
    ws_.row_route(b, row, k) = position;
    ws_.expert_row_index(b, position) = row;
    ws_.route_weight(b, position) = *ws_.table_weight.at(b, rank, token, k);
    ws_.route_src_rank(b, position) = rank;
    ws_.route_src_token(b, position) = token;
  }

  MOE_A2A_DEVICE void write_padding(int expert) const {
    const int32_t end = start_[expert] + extent(expert);
    for (int32_t p = start_[expert] + count_[expert] + block_.rank(); p < end; p += block_.size()) {
      ws_.expert_row_index(args_.buffer, p) = -1;
      ws_.route_weight(args_.buffer, p) = 0;
      ws_.route_src_rank(args_.buffer, p) = -1;
      ws_.route_src_token(args_.buffer, p) = -1;
    }
  }

  const DispatchRecvArgs& args_;
  const MoeConfig& config_;
  const Workspace& ws_;
  const Grid& grid_;
  const Block& block_;
  int32_t* counters_;    // [kListsPerPass][block.size()]
  int32_t* count_;       // [num_local_experts + 1]  entries of each list
  int32_t* start_;       // [num_local_experts + 1]  first position of each expert in the layout
  int32_t* num_tokens_;  // [num_ranks]
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
