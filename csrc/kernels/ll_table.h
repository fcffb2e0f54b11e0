// The choices of small batches at their receiver: raw, as they came in LL words. A block that needs them takes those of
// all ranks into its shared memory and counts there what the sender of a large batch would have counted.
#pragma once

#include "kernels/ll_choice.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

class LlTable {
 public:
  // Parts into which a rank's tokens are cut at most, each counted by a warp.
  MOE_A2A_HOST_DEVICE static int most_segments(const MoeConfig& config) {
    constexpr int kOfAllRanks = 8, kNumCounters = 4096;
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
        most_segments_(most_segments(context.config)) {
    const int tokens = config_.num_ranks * config_.num_max_ll_tokens;
    count_ = reinterpret_cast<int32_t*>(shared);
    landing_ = count_ + num_counts(config_);
    weight_ = reinterpret_cast<float*>(landing_ + tokens);
    choice_ = reinterpret_cast<Choice*>(weight_ + tokens * config_.num_topk);
  }

  // The choices of the ranks whose number of tokens says that they send this way; false when a wait was given up. All
  // ranks' choices lie on one line, a thread for each.
  MOE_A2A_DEVICE bool receive(const int32_t* num_tokens, uint64_t epoch) {
    const int num_topk = config_.num_topk;
    int i = block_.rank();
    for (int r = 0; r < config_.num_ranks; ++r) {
      if (!config_.sends_ll(num_tokens[r])) continue;
      const int num_choices = num_tokens[r] * num_topk, first = token_idx(r, 0) * num_topk;
      for (; i < num_choices; i += block_.size()) {
        int expert;
        if (!receive_choice(context_, buffer_, r, i / num_topk, i % num_topk, epoch, i == 0, &expert,
                            &weight_[first + i])) {
          return false;
        }
        choice_[first + i].expert = static_cast<int16_t>(expert);
      }
      i -= num_choices;
    }
    return true;
  }

  MOE_A2A_DEVICE void count(const int32_t* num_tokens) {
    if (config_.num_max_ll_tokens == 0) return;
    for (int i = block_.rank(); i < num_counts(config_); i += block_.size()) count_[i] = 0;
    block_.sync();
    for (int i = block_.warp_rank(); i < config_.num_ranks * most_segments_; i += block_.num_warps()) {
      const int rank = i / most_segments_, segment = i % most_segments_;
      if (!config_.sends_ll(num_tokens[rank])) continue;
      number_choices(rank, segment, num_tokens[rank]);
      if (segment == 0) number_landings(rank, num_tokens[rank]);
    }
    block_.sync();
  }

  // Segments of so many tokens, and the tokens before one of them.
  MOE_A2A_DEVICE int num_segments(int num_tokens) const {
    const int wanted = (num_tokens * config_.num_topk + kChoicesOfSegment - 1) / kChoicesOfSegment;
    return wanted < most_segments_ ? wanted : most_segments_;
  }
  MOE_A2A_DEVICE int first_token(int segment, int num_tokens) const {
    const int segments = num_segments(num_tokens);
    return segment < segments ? segment * num_tokens / segments : num_tokens;
  }

  // What a large batch's table says of a chunk: counts of the lists (the tokens that land here: all in the first
  // segment), the place of a token among the rank's that land here (-1: it does not), and of each choice the local
  // expert and how many of that expert are before it in its segment.
  MOE_A2A_DEVICE int32_t count(int rank, int segment, int list) const { return counts_of(rank, segment)[list]; }
  MOE_A2A_DEVICE int32_t landing(int rank, int token) const { return landing_[token_idx(rank, token)]; }

  // Calls visit(local expert, idx, weight) for the choices of a token that are ours, in k order.
  template <class Visit>
  MOE_A2A_DEVICE void visit(int rank, int token, Visit visit) const {
    const int first = token_idx(rank, token) * config_.num_topk;
    for (int k = 0; k < config_.num_topk; ++k) {
      const Choice choice = choice_[first + k];
      if (choice.expert >= 0) visit(choice.expert, choice.idx, weight_[first + k]);
    }
  }

 private:
  struct Choice {
    int16_t expert;  // local; -1: not ours
    uint16_t idx;    // how many choices of its segment and expert stand before it
  };
  // Fewer are not worth another segment.
  static constexpr int kChoicesOfSegment = 64;

  // A list per local expert, and one of the tokens that land here.
  MOE_A2A_HOST_DEVICE static int num_lists(const MoeConfig& config) { return config.num_local_experts() + 1; }
  MOE_A2A_HOST_DEVICE static int num_counts(const MoeConfig& config) {
    return config.num_ranks * most_segments(config) * num_lists(config);
  }
  MOE_A2A_DEVICE int32_t* counts_of(int rank, int segment) const {
    return count_ + (rank * most_segments_ + segment) * num_lists(config_);
  }

  MOE_A2A_DEVICE int token_idx(int rank, int token) const { return rank * config_.num_max_ll_tokens + token; }

  MOE_A2A_DEVICE void number_choices(int rank, int segment, int num_tokens) const {
    const Warp warp = block_.warp();
    Choice* choices = choice_ + token_idx(rank, 0) * config_.num_topk;
    int32_t* counts = counts_of(rank, segment);
    const int end = first_token(segment + 1, num_tokens) * config_.num_topk;
    for (int base = first_token(segment, num_tokens) * config_.num_topk; base < end; base += warp.size()) {
      const int i = base + warp.rank();
      const int expert = i < end ? choices[i].expert : -1;
      const Matches matches = warp.matches(expert);
      if (expert >= 0) choices[i].idx = static_cast<uint16_t>(counts[expert] + matches.before);
      warp.sync();  // all have read before one moves the counter on
      if (expert >= 0 && matches.before == 0) counts[expert] += matches.total;
      warp.sync();
    }
  }

  MOE_A2A_DEVICE void number_landings(int rank, int num_tokens) const {
    const Warp warp = block_.warp();
    int32_t num_landed = 0;
    for (int base = 0; base < num_tokens; base += warp.size()) {
      const int token = base + warp.rank();
      bool lands = false;
      for (int k = 0; k < config_.num_topk && token < num_tokens; ++k) {
        lands |= choice_[token_idx(rank, token) * config_.num_topk + k].expert >= 0;
      }
      const int32_t up_to_here = num_landed + warp.inclusive_sum(static_cast<int32_t>(lands));
      if (token < num_tokens) landing_[token_idx(rank, token)] = lands ? up_to_here - 1 : -1;
      num_landed = warp.last(up_to_here);
    }
    if (warp.rank() == 0) counts_of(rank, 0)[config_.num_local_experts()] = num_landed;
  }

  const Context& context_;
  const MoeConfig& config_;
  int buffer_;
  const Block& block_;
  int most_segments_;
  int32_t* count_;    // [num_ranks, most_segments, lists]
  int32_t* landing_;  // [num_ranks, num_max_ll_tokens]
  float* weight_;     // [num_ranks, num_max_ll_tokens, num_topk]
  Choice* choice_;    // [num_ranks, num_max_ll_tokens, num_topk]
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
