// Routing tables of small and medium batches at the receiver: raw choices, as they arrive in LL words. Each block that
// needs them reads those of all ranks into its shared memory and counts what the sender of a large batch would have
// counted.
#pragma once

#include "arch/shared_plan.h"
#include "moe/route/chunk_table.h"
#include "moe/route/ll_choice.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

class LlTable {
 public:
  struct Choice {
    int16_t expert;  // local; -1: not here
    uint16_t idx;    // how many choices of its expert precede it in its segment
  };
  struct Plan {
    SharedPart<int32_t> counts;      // [num_ranks, 2^log2_segments(), lists]
    SharedPart<int32_t> landed_idx;  // [num_ranks, num_max_ll_tokens]  directly after the counts: clear() zeroes both
    SharedPart<float> weights;       // [num_ranks, num_max_ll_tokens, num_topk]
    SharedPart<Choice> choices;      // [num_ranks, num_max_ll_tokens, num_topk]
  };
  MOE_A2A_HOST_DEVICE static Plan plan(const MoeConfig& config, SharedCarver& carver) {
    if (config.num_max_ll_tokens == 0) return {};
    const int tokens = config.num_ranks * config.num_max_ll_tokens;
    Plan plan;
    plan.counts = carver.take<int32_t>(num_counts(config));
    plan.landed_idx = carver.take<int32_t>(tokens);
    plan.weights = carver.take<float>(tokens * config.num_topk);
    plan.choices = carver.take<Choice>(tokens * config.num_topk);
    return plan;
  }
  // Each rank's batch is cut into at most 2^log2_segments() segments; a warp counts each.
  MOE_A2A_HOST_DEVICE static int log2_segments(const MoeConfig& config) {
    constexpr int kOfAllRanks = 16, kNumCounters = 4096;
    const int counters = config.num_ranks * num_lists(config);
    int log2 = 0;
    while (config.num_ranks << (log2 + 1) <= kOfAllRanks && counters << (log2 + 1) <= kNumCounters) ++log2;
    return log2;
  }

  MOE_A2A_DEVICE LlTable(const Context& context, int buffer, const Block& block, std::byte* shared, const Plan& plan)
      : context_(context),
        config_(context.config),
        buffer_(buffer),
        block_(block),
        log2_segments_(log2_segments(context.config)),
        num_bits_(bits_of_values(context.config.num_local_experts)),
        threads_(block, context.config.num_topk),
        count_(plan.counts.in(shared)),
        landed_idx_(plan.landed_idx.in(shared)),
        weight_(plan.weights.in(shared)),
        choice_(plan.choices.in(shared)) {}

  MOE_A2A_DEVICE bool has(int num_tokens) const { return config_.sends_ll_choices(num_tokens); }
  // Called for the batch of each rank, before receive(). The longest decides how long the segments are.
  MOE_A2A_DEVICE void expect(int num_tokens) {
    sums_return_ll_ &= config_.returns_ll(num_tokens);
    if (!has(num_tokens)) return;
    is_used_ = true;
    while (num_tokens > 1 << (log2_segments_ + segment_shift_)) ++segment_shift_;
  }
  // Whether any rank's batch is here.
  MOE_A2A_DEVICE bool is_used() const { return is_used_; }
  // Whether the sums of all ranks' batches return as LL words.
  MOE_A2A_DEVICE bool sums_return_ll() const { return sums_return_ll_; }
  // A segment has 2^this tokens.
  MOE_A2A_DEVICE int segment_shift() const { return segment_shift_; }
  MOE_A2A_DEVICE const ChoiceThreads& threads() const { return threads_; }

  // Called before receive(), with a block barrier in between.
  MOE_A2A_DEVICE void clear() {
    if (config_.num_max_ll_tokens == 0) return;
    const int num_words = num_counts(config_) + config_.num_ranks * config_.num_max_ll_tokens;
    MOE_A2A_ROLLED
    for (int i = block_.rank(); i < num_words; i += block_.size()) count_[i] = 0;
  }

  // Receives the choices of all small and medium batches, a thread per choice; false if a wait gave up.
  MOE_A2A_DEVICE bool receive(const int32_t* num_tokens, uint64_t epoch) {
    return walk_tokens(num_tokens, threads_.token, threads_.num_tokens, [&](int rank, int token) {
      MOE_A2A_ROLLED
      for (int k = threads_.k; k < config_.num_topk; k += threads_.per_token) {
        if (!receive(rank, token, k, epoch)) return false;
      }
      return true;
    });
  }

  // Calls visit(rank, token) for every stride-th of all small and medium batches' tokens, from `first` on; stops with
  // false as soon as a visit returns false. The threads of a warp visit theirs together, whatever the ranks; in a loop
  // over the ranks, a warp with tokens of three ranks would visit three times.
  template <class Visit>
  MOE_A2A_DEVICE bool walk_tokens(const int32_t* num_tokens, int first, int stride, const Visit& visit) const {
    int rank = 0;
    MOE_A2A_ROLLED
    for (int token = first;; token += stride) {
      MOE_A2A_ROLLED
      for (; rank < config_.num_ranks; ++rank) {
        const int here = has(num_tokens[rank]) ? num_tokens[rank] : 0;
        if (token < here) break;
        token -= here;
      }
      if (rank == config_.num_ranks) return true;
      if (!visit(rank, token)) return false;
    }
  }

  // A warp per segment; needs a block barrier before and after.
  MOE_A2A_DEVICE void count(const int32_t* num_tokens) const {
    MOE_A2A_ROLLED
    for (int i = block_.warp_rank(); is_used_ && i < config_.num_ranks << log2_segments_; i += block_.num_warps()) {
      const int rank = i >> log2_segments_, segment = i & ((1 << log2_segments_) - 1);
      const int first = segment << segment_shift_, end = first + (1 << segment_shift_);
      const int here = has(num_tokens[rank]) ? num_tokens[rank] : 0;
      if (first < here) count_segment(rank, first, end < here ? end : here, counts_of(rank, segment));
    }
  }

  // Counts per list of a segment, [num_lists]; the table of a large batch has them per chunk.
  MOE_A2A_DEVICE int32_t* counts_of(int rank, int segment) const {
    return count_ + ((rank << log2_segments_) + segment) * num_lists(config_);
  }
  // The number of entries of a list in all of a rank's segments. Replaces each count by the number of entries before
  // the segment, including `before` from other ranks. Segments that the batch does not have count as empty.
  MOE_A2A_DEVICE int32_t sum(int rank, int list, int32_t before) const {
    constexpr int kUnroll = kBlockThreads > 1 ? 4 : 1;
    const int stride = num_lists(config_), num_segments = 1 << log2_segments_;
    int32_t* counts = counts_of(rank, 0) + list;
    int32_t sum = 0;
    MOE_A2A_ROLLED
    for (int first = 0; first < num_segments; first += kUnroll) {
      int32_t count[kUnroll];
      MOE_A2A_UNROLL
      for (int u = 0; u < kUnroll; ++u) count[u] = first + u < num_segments ? counts[(first + u) * stride] : 0;
      MOE_A2A_UNROLL
      for (int u = 0; u < kUnroll; ++u) {
        if (first + u < num_segments) counts[(first + u) * stride] = before + sum;
        sum += count[u];
      }
    }
    return sum;
  }

  // A token's choices, shared by several threads.
  class Token {
   public:
    MOE_A2A_DEVICE Token(const LlTable& table, int rank, int token)
        : table_(table), idx_(table.token_idx(rank, token)) {}

    // How many tokens of its segment land here before this one; -1: it does not.
    MOE_A2A_DEVICE int32_t landed_idx() const { return table_.landed_idx_[idx_]; }
    MOE_A2A_DEVICE bool is_leader() const { return table_.threads_.k == 0; }
    MOE_A2A_DEVICE float weight(int k) const { return table_.weight_[idx_ * table_.config_.num_topk + k]; }
    MOE_A2A_DEVICE LocalChoice choice(int k) const {
      const Choice choice = table_.choice_[idx_ * table_.config_.num_topk + k];
      return {choice.expert, choice.idx};
    }

    // Calls visit(k, choice) for this thread's choices.
    template <class Visit>
    MOE_A2A_DEVICE void visit_choices(const Visit& visit) const {
      MOE_A2A_ROLLED
      for (int k = table_.threads_.k; k < table_.config_.num_topk; k += table_.threads_.per_token) {
        visit(k, choice(k));
      }
    }

   private:
    const LlTable& table_;
    int idx_;
  };

 private:
  // Counters for shorter segments would not pay.
  static constexpr int kLeastShift = 2;

  // One list per local expert, and one of the tokens that land here.
  MOE_A2A_HOST_DEVICE static int num_lists(const MoeConfig& config) { return config.num_local_experts + 1; }
  MOE_A2A_HOST_DEVICE static int num_counts(const MoeConfig& config) {
    return (config.num_ranks << log2_segments(config)) * num_lists(config);
  }

  MOE_A2A_DEVICE int token_idx(int rank, int token) const { return rank * config_.num_max_ll_tokens + token; }

  MOE_A2A_DEVICE bool receive(int rank, int token, int k, uint64_t epoch) {
    int expert;
    float weight;
    if (!receive_choice(context_, buffer_, rank, token, k, epoch, token == 0 && k == 0, &expert, &weight)) return false;
    const int i = token_idx(rank, token) * config_.num_topk + k;
    choice_[i].expert = static_cast<int16_t>(expert);
    weight_[i] = weight;
    if (expert >= 0) atomic_store<Order::kRelaxed, Scope::kBlock>(&landed_idx_[token_idx(rank, token)], 1);
    return true;
  }

  // Numbers the choices and the landed tokens of a segment. Before the call, landed_idx_ says whether a token lands
  // here.
  MOE_A2A_DEVICE void count_segment(int rank, int first_token, int end_token, int32_t* counts) const {
    const Warp warp = block_.warp();
    Choice* choices = choice_ + token_idx(rank, 0) * config_.num_topk;
    number_equal(
        warp, first_token * config_.num_topk, end_token * config_.num_topk, num_bits_, counts,
        [&](int i) { return choices[i].expert; },
        [&](int i, int, int idx) { choices[i].idx = static_cast<uint16_t>(idx); });
    int32_t* landed_idx = landed_idx_ + token_idx(rank, 0);
    const int32_t num_landed = number_members(
        warp, first_token, end_token, [&](int t) { return landed_idx[t] != 0; },
        [&](int t, int32_t idx) { landed_idx[t] = idx; });
    if (warp.rank() == 0) counts[config_.num_local_experts] = num_landed;
  }

  const Context& context_;
  const MoeConfig& config_;
  int buffer_;
  const Block& block_;
  int log2_segments_, num_bits_;
  int segment_shift_ = kLeastShift;
  ChoiceThreads threads_;
  int32_t* count_;
  int32_t* landed_idx_;
  float* weight_;
  Choice* choice_;
  bool is_used_ = false, sums_return_ll_ = true;
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
