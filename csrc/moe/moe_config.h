// The sizes that all ranks agree on when an ExpertParallel is made.
#pragma once

#include <cstdint>
#include <string>

#include "arch/number.h"
#include "comm/heap_view.h"

namespace moe_a2a {

// The payload of a signal holds a number of tokens (signal.h), one value of it means "refused".
inline constexpr int kMaxTokensPerRank = (1 << 20) - 2;
// An entry of the routing table holds an expert in 16 bits, and in as many its place in a chunk of tokens.
inline constexpr int kMaxExperts = 65535;
inline constexpr int kMaxTopk = 64;
// Length of the values that share one scale in a float8 row.
inline constexpr int kScaleBlock = 128;
// Rows of small batches are cut into pieces of so many scale blocks: few whole rows would leave most warps without
// work.
inline constexpr int kPieceBlocks = 4;
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
  MOE_A2A_HOST_DEVICE constexpr int num_scales() const { return (hidden + kScaleBlock - 1) / kScaleBlock; }
  // Routes that can arrive here: every token of every rank may bring all of its choices.
  MOE_A2A_HOST_DEVICE constexpr int64_t route_capacity() const {
    return static_cast<int64_t>(num_ranks) * num_max_tokens_per_rank * num_topk;
  }
  MOE_A2A_HOST_DEVICE constexpr int64_t row_capacity() const {
    return static_cast<int64_t>(num_ranks) * num_max_tokens_per_rank;
  }

  // Where the scales start inside a float8 row.
  MOE_A2A_HOST_DEVICE constexpr int64_t scales_offset() const { return (hidden + 15) / 16 * 16; }
  // Bytes that travel for one row.
  MOE_A2A_HOST_DEVICE constexpr int64_t row_bytes(DType row_dtype) const {
    return row_dtype == DType::kFloat8 ? scales_offset() + int64_t{4} * num_scales()
                                       : static_cast<int64_t>(hidden) * size_of(row_dtype);
  }
  // Bytes from one row of the heap to the next: rows start on 128-byte lines (8 % of the link, measured on H200).
  MOE_A2A_HOST_DEVICE constexpr int64_t row_stride(DType row_dtype) const {
    return (row_bytes(row_dtype) + 127) / 128 * 128;
  }
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
  // Values of a row that a warp sends or takes at a time: whole scale blocks, so that no two pieces share a scale. The
  // last piece of a row may have fewer.
  MOE_A2A_HOST_DEVICE static constexpr int piece_length() { return kPieceBlocks * kScaleBlock; }
  MOE_A2A_HOST_DEVICE constexpr int num_pieces() const { return (hidden + piece_length() - 1) / piece_length(); }
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
