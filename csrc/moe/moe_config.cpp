#include "moe/moe_config.h"

#include <algorithm>

namespace moe_a2a {
namespace {

std::string less_than_one(const char* name, int value) {
  return std::string(name) + "=" + std::to_string(value) + " < 1; pass " + name + "=1 or more";
}

std::string more_than(const char* name, int value, int limit) {
  return std::string(name) + "=" + std::to_string(value) + " > " + std::to_string(limit) + "; pass " + name + "=" +
         std::to_string(limit) + " or less";
}

}  // namespace

std::string MoeConfig::violation() const {
  const auto text = [](int value) { return std::to_string(value); };
  if (num_experts < 1) return less_than_one("num_experts", num_experts);
  if (num_experts % num_ranks != 0) {
    return "num_experts=" + text(num_experts) + " is not divisible by num_ranks=" + text(num_ranks) +
           "; pass num_experts=" + text((num_experts + num_ranks - 1) / num_ranks * num_ranks) +
           " and leave the added experts unused";
  }
  if (num_topk < 1) return less_than_one("num_topk", num_topk);
  if (num_experts > kMaxExperts) return more_than("num_experts", num_experts, kMaxExperts);
  if (num_topk > kMaxTopk) return more_than("num_topk", num_topk, kMaxTopk);
  if (hidden < 1) return less_than_one("hidden", hidden);
  if (num_max_tokens_per_rank < 1) return less_than_one("num_max_tokens_per_rank", num_max_tokens_per_rank);
  if (num_max_tokens_per_rank > kMaxTokensPerRank) {
    return more_than("num_max_tokens_per_rank", num_max_tokens_per_rank, kMaxTokensPerRank);
  }
  if (num_max_ll_tokens < 0) return "num_max_ll_tokens=" + text(num_max_ll_tokens) + " < 0; pass 0 or more";
  if (num_max_ll_tokens > ll_token_capacity()) {
    return "num_max_ll_tokens=" + text(num_max_ll_tokens) + " > " + text(ll_token_capacity()) +
           ", the most that receivers can count; pass num_max_ll_tokens=" + text(ll_token_capacity()) + ", or less";
  }
  if (num_buffers < 1) return less_than_one("num_buffers", num_buffers);
  return {};
}

// NVIDIA: as many as a receiver can count (2 H200, 256 tokens: 33.7 us, 43.2 with a table). AMD: a guess; words double
// the bytes there. On a CPU a fence costs nothing.
int default_ll_tokens(const MoeConfig& config, const std::string& target) {
  const int wanted = target == "cuda" ? kMaxLlTokens : target == "hip" ? 32 : 0;
  return std::min(wanted, config.ll_token_capacity());
}

}  // namespace moe_a2a
