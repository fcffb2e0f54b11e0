// The sizes that all ranks agree on when an ExpertParallel is made.
#pragma once

#include <cstdint>
#include <string>

#include "arch/number.h"
#include "comm/heap_view.h"
#include "rows/row_layout.h"

namespace moe_a2a {

// The payload of a signal holds a number of tokens (signal.h), one value of it means "refused".
inline constexpr int kMaxTokensPerRank = (1 << 20) - 2;
// An entry of the routing table holds an expert in 16 bits, and in as many its place in a chunk of tokens.
inline constexpr int kMaxExperts = 65535;
inline constexpr int kMaxTopk = 64;
// Most tokens that travel as LL words. Their receiver counts in the shared memory of a block: choices of all ranks'
// tokens, experts.
inline constexpr int kMaxLlTokens = 256;
inline constexpr int kMaxLlChoices = 4096;
inline constexpr int kMaxLlExperts = 2048;

struct MoeConfig {
  int rank = 0;
  int num_ranks = 1;
  int num_experts = 0;
  int num_topk = 0;
  int hidden = 0;
  int num_max_tokens_per_rank = 0;
  int num_buffers = 2;
  DType dtype = DType::kBfloat16;
  int num_max_ll_tokens = 0;  // a rank's batch of up to so many tokens travels as LL words (comm/ll_word.h)

  MOE_A2A_HOST_DEVICE constexpr int num_local_experts() const { return num_experts / num_ranks; }
  MOE_A2A_HOST_DEVICE constexpr int num_scales() const { return row(DType::kFloat8).num_scales(); }
  // Routes that can arrive here: every token of every rank may bring all of its choices.
  MOE_A2A_HOST_DEVICE constexpr int64_t route_capacity() const {
    return static_cast<int64_t>(num_ranks) * num_max_tokens_per_rank * num_topk;
  }
  MOE_A2A_HOST_DEVICE constexpr int64_t row_capacity() const {
    return static_cast<int64_t>(num_ranks) * num_max_tokens_per_rank;
  }

  MOE_A2A_HOST_DEVICE constexpr RowLayout row(DType row_dtype) const { return {hidden, row_dtype}; }
  MOE_A2A_HOST_DEVICE constexpr int64_t scales_offset() const { return row(DType::kFloat8).scales_offset(); }
  MOE_A2A_HOST_DEVICE constexpr int64_t row_bytes(DType row_dtype) const { return row(row_dtype).num_bytes(); }
  MOE_A2A_HOST_DEVICE constexpr int64_t row_stride(DType row_dtype) const { return row(row_dtype).stride(); }
  MOE_A2A_HOST_DEVICE constexpr int64_t max_row_stride() const {
    const int64_t own = row_stride(dtype), quantized = row_stride(DType::kFloat8);
    return own > quantized ? own : quantized;
  }

  // ---- LL words: small batches, of which the latency counts

  // The largest num_max_ll_tokens.
  MOE_A2A_HOST_DEVICE constexpr int ll_token_capacity() const {
    if (num_experts > kMaxLlExperts) return 0;
    const int most = num_max_tokens_per_rank < kMaxLlTokens ? num_max_tokens_per_rank : kMaxLlTokens;
    const int fits = kMaxLlChoices / (num_ranks * num_topk);
    return fits < most ? fits : most;
  }
  MOE_A2A_HOST_DEVICE constexpr bool sends_ll(int num_tokens) const {
    return num_max_ll_tokens > 0 && num_tokens <= num_max_ll_tokens;
  }
  MOE_A2A_HOST_DEVICE constexpr int num_pieces() const { return row(dtype).num_pieces(); }
  // Bytes that `num_dwords` take as LL words, in pieces: up to twice as many, and each piece ends with a whole word.
  static constexpr int64_t ll_bytes(int64_t num_dwords, int num_pieces) {
    return (8 * num_dwords + 32 * num_pieces + 127) / 128 * 128;
  }
  // Three dwords for each choice, in whole words: 16 bytes or 24.
  constexpr int64_t ll_choices_stride() const { return (24 * int64_t{num_topk} + 15) / 16 * 16; }
  constexpr int64_t ll_row_stride() const { return ll_bytes(max_row_stride() / 4, num_pieces()); }

  // The first rule that does not hold, in words that name value, limit and argument; empty when all hold.
  std::string violation() const;
};

// The num_max_ll_tokens of a caller who does not say.
int default_ll_tokens(const MoeConfig& config, const std::string& target);

}  // namespace moe_a2a
