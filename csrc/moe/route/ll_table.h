// The choices of small batches at their receiver: raw, as they came in LL words. A block that needs them takes those of
// all ranks into its shared memory and counts there what the sender of a large batch would have counted.
#pragma once

#include "moe/route/ll_choice.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// A choice as the lists take it: local expert (-1: not ours), how many of its chunk and expert stand before it.
struct LocalChoice {
  int expert, idx;
};

class LlTable {
 public:
  // A rank's tokens are cut into segments of 2^shift tokens, at most so many, each counted by a warp.
  MOE_A2A_HOST_DEVICE static int most_segments(const MoeConfig& config) {
    constexpr int kOfAllRanks = 16, kNumCounters = 4096;
    const int wanted = kOfAllRanks / config.num_ranks, fits = kNumCounters / (config.num_ranks * num_lists(config));
    const int most = wanted < fits ? wanted : fits;
    return most > 1 ? most : 1;
  }
  MOE_A2A_HOST_DEVICE static size_t shared_bytes(const MoeConfig& config) {
    if (config.num_max_ll_tokens == 0) return 0;
    const size_t tokens = size_t(config.num_ranks) * config.num_max_ll_tokens;
    return tokens * config.num_topk * (sizeof(Choice) + sizeof(float)) +
           (tokens + num_counts(config)) * sizeof(int32_t);
  }

  MOE_A2A_DEVICE LlTable(const Context& context, int buffer, const Block& block, std::byte* shared)
      : context_(context),
        config_(context.config),
        buffer_(buffer),
        block_(block),
        most_segments_(most_segments(context.config)),
        num_bits_(bits_of_values(context.config.num_local_experts())),
        threads_(block, context.config.num_topk) {
    const int tokens = config_.num_ranks * config_.num_max_ll_tokens;
    count_ = reinterpret_cast<int32_t*>(shared);
    landing_ = count_ + num_counts(config_);
    weight_ = reinterpret_cast<float*>(landing_ + tokens);
    choice_ = reinterpret_cast<Choice*>(weight_ + tokens * config_.num_topk);
  }

  MOE_A2A_DEVICE const ChoiceThreads& threads() const { return threads_; }

  // Before anything is received; the block meets in between.
  MOE_A2A_DEVICE void clear() {
    if (config_.num_max_ll_tokens == 0) return;
    // landing_ lies behind count_.
    const int num_words = num_counts(config_) + config_.num_ranks * config_.num_max_ll_tokens;
    MOE_A2A_ROLLED
    for (int i = block_.rank(); i < num_words; i += block_.size()) count_[i] = 0;
  }

  // The choices of the ranks whose number of tokens says that they send this way; false when a wait was given up. All
  // ranks' tokens lie on one line, a thread for each choice.
  MOE_A2A_DEVICE bool receive(const int32_t* num_tokens, uint64_t epoch) {
    int token = threads_.token;
    MOE_A2A_ROLLED
    for (int r = 0; r < config_.num_ranks; ++r) {
      if (!config_.sends_ll(num_tokens[r])) continue;
      MOE_A2A_ROLLED
      for (; token < num_tokens[r]; token += threads_.num_tokens) {
        MOE_A2A_ROLLED
        for (int k = threads_.k; k < config_.num_topk; k += threads_.per_token) {
          if (!receive(r, token, k, epoch)) return false;
        }
      }
      token -= num_tokens[r];
    }
    return true;
  }

  // A warp for each segment; the block meets before and after.
  MOE_A2A_DEVICE void count(const int32_t* num_tokens) const {
    int segment = block_.warp_rank();
    MOE_A2A_ROLLED
    for (int r = 0; r < config_.num_ranks; ++r) {
      if (!config_.sends_ll(num_tokens[r])) continue;
      const int shift = segment_shift(num_tokens[r]), segments = num_segments(num_tokens[r]);
      MOE_A2A_ROLLED
      for (; segment < segments; segment += block_.num_warps()) {
        const int first = segment << shift, end = first + (1 << shift);
        number_choices(r, first, end < num_tokens[r] ? end : num_tokens[r], counts_of(r, segment));
      }
      segment -= segments;
    }
  }

  MOE_A2A_DEVICE int segment_shift(int num_tokens) const {
    int shift = kFewestShift;
    MOE_A2A_ROLLED
    while (num_tokens > most_segments_ << shift) ++shift;
    return shift;
  }
  MOE_A2A_DEVICE int num_segments(int num_tokens) const {
    const int shift = segment_shift(num_tokens);
    return (num_tokens + (1 << shift) - 1) >> shift;
  }

  // What a large batch's table says of a chunk: counts of the lists, [num_lists], the place of a token among those of
  // its segment that land here (-1: it does not), and of each choice the local expert and how many of that expert are
  // before it in its segment.
  MOE_A2A_DEVICE int32_t* counts_of(int rank, int segment) const {
    return count_ + (rank * most_segments_ + segment) * num_lists(config_);
  }
  MOE_A2A_DEVICE int32_t landing(int rank, int token) const { return landing_[token_idx(rank, token)]; }
  MOE_A2A_DEVICE LocalChoice choice(int rank, int token, int k) const {
    const Choice choice = choice_[token_idx(rank, token) * config_.num_topk + k];
    return {choice.expert, choice.idx};
  }
  MOE_A2A_DEVICE float weight(int rank, int token, int k) const {
    return weight_[token_idx(rank, token) * config_.num_topk + k];
  }

 private:
  struct Choice {
    int16_t expert;  // local; -1: not ours
    uint16_t idx;    // how many choices of its segment and expert stand before it
  };
  // Segments of fewer than 4 tokens are not worth their counters.
  static constexpr int kFewestShift = 2;

  // A list per local expert, and one of the tokens that land here.
  MOE_A2A_HOST_DEVICE static int num_lists(const MoeConfig& config) { return config.num_local_experts() + 1; }
  MOE_A2A_HOST_DEVICE static int num_counts(const MoeConfig& config) {
    return config.num_ranks * most_segments(config) * num_lists(config);
  }

  MOE_A2A_DEVICE int token_idx(int rank, int token) const { return rank * config_.num_max_ll_tokens + token; }

  MOE_A2A_DEVICE bool receive(int rank, int token, int k, uint64_t epoch) {
    int expert;
    float weight;
    if (!receive_choice(context_, buffer_, rank, token, k, epoch, token == 0 && k == 0, &expert, &weight)) return false;
    const int i = token_idx(rank, token) * config_.num_topk + k;
    choice_[i].expert = static_cast<int16_t>(expert);
    weight_[i] = weight;
    if (expert >= 0) atomic_store<Order::kRelaxed, Scope::kBlock>(&landing_[token_idx(rank, token)], 1);
    return true;
  }

  // Choices and landed tokens of a segment. landing_ has said whether a token lands here.
  MOE_A2A_DEVICE void number_choices(int rank, int first_token, int end_token, int32_t* counts) const {
    const Warp warp = block_.warp();
    Choice* choices = choice_ + token_idx(rank, 0) * config_.num_topk;
    const int end = end_token * config_.num_topk;
    MOE_A2A_ROLLED
    for (int base = first_token * config_.num_topk; base < end; base += warp.size()) {
      const int i = base + warp.rank();
      const int expert = i < end ? choices[i].expert : -1;
      const Matches matches = warp.matches(expert, num_bits_);
      if (expert >= 0) choices[i].idx = static_cast<uint16_t>(counts[expert] + matches.before);
      warp.sync();  // all have read before one moves the counter on
      if (expert >= 0 && matches.before == 0) counts[expert] += matches.total;
      warp.sync();
    }
    int32_t num_landed = 0;
    MOE_A2A_ROLLED
    for (int base = first_token; base < end_token; base += warp.size()) {
      const int token = base + warp.rank();
      int32_t* landing = landing_ + token_idx(rank, token);
      const bool lands = token < end_token && *landing != 0;
      const Matches matches = warp.matches(lands, 1);
      if (token < end_token) *landing = lands ? num_landed + matches.before : -1;
      num_landed += lands ? matches.total : warp.size() - matches.total;
    }
    if (warp.rank() == 0) counts[config_.num_local_experts()] = num_landed;
  }

  const Context& context_;
  const MoeConfig& config_;
  int buffer_;
  const Block& block_;
  int most_segments_, num_bits_;
  ChoiceThreads threads_;
  int32_t* count_;    // [num_ranks, most_segments, lists]
  int32_t* landing_;  // [num_ranks, num_max_ll_tokens]
  float* weight_;     // [num_ranks, num_max_ll_tokens, num_topk]
  Choice* choice_;    // [num_ranks, num_max_ll_tokens, num_topk]
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
