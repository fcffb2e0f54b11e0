// The sizes that all ranks agree on when an ExpertParallel is made.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <string>

#include "arch/number.h"
#include "comm/divisor.h"
#include "comm/heap_view.h"
#include "rows/row_layout.h"

namespace moe_a2a {

// So that a BatchHeader fits into the payload of a signal.
inline constexpr int kMaxTokensPerRank = 1 << 17;
// A RouteEntry holds the expert in 16 bits (one value means "dropped") and its index in the chunk in 16 more.
inline constexpr int kMaxExperts = 65535;
inline constexpr int kMaxTopk = 64;
static_assert(int64_t{kMaxRanks} * kMaxTokensPerRank * kMaxTopk <= INT32_MAX, "routes are numbered by int32_t");
// Limits of LL batches: their receiver counts in a block's shared memory. kMaxLlChoices is over all ranks' tokens.
inline constexpr int kMaxLlTokens = 256;
inline constexpr int kMaxLlChoices = 4096;
inline constexpr int kMaxLlExperts = 2048;

// What the rows of a batch travel as: the object's dtype, or float8 with scales of float32 or, four in place of each
// float32, of bytes (MXFP8).
enum class RowFormat : uint32_t { kPlain, kFloat8, kMxFloat8 };

struct MoeConfig {
  int rank = 0;
  int num_ranks = 1;
  int num_experts = 0;
  int num_topk = 0;
  int hidden = 0;
  int num_max_tokens_per_rank = 0;
  int num_buffers = 2;
  DType dtype = DType::kBfloat16;
  int num_max_ll_tokens = 0;  // the choices of a batch of at most this many tokens travel as LL words (comm/ll_word.h)
  // So do the batch's rows, if those to all other ranks together are no larger than kMaxLlRowBytes. Quantised rows: 1.5
  // times that, since as whole rows they would first be formed in shared memory. Hidden 7168, us as words / as rows:
  //   2 H200, 64 tokens (0.9 MB) 18 / 18, 128 (1.8 MB) 25.4 / 23.3
  //   4 H100, 24 tokens (1.0 MB) 19.9 / 19.8, 64 (2.8 MB) 29.8 / 25.8
  //   4 H100, quantised, 64 tokens (1.4 MB) 23.4 / 25.4, 96 (2.1 MB) 27.3 / 27.6
  static constexpr int64_t kMaxLlRowBytes = 1 << 20;
  int max_ll_row_tokens = num_tokens_in(kMaxLlRowBytes, dtype);
  int max_ll_quantized_row_tokens = num_tokens_in(kMaxLlRowBytes * 3 / 2, DType::kFloat8);
  // So do the batch's sums, if those from all other ranks together are no larger than this. 128 tokens, us as words /
  // as rows: 4 H200 (5.5 MB) 48 / 38, 2 H200 (1.8 MB) 31.4 / 35.7.
  static constexpr int64_t kMaxLlSumBytes = 3 << 20;
  int max_ll_sum_tokens = num_tokens_in(kMaxLlSumBytes, dtype);
  // Derived from the sizes above, which therefore never change. Stored, since kernels would otherwise divide, on the
  // critical path of a small batch.
  int num_local_experts = num_ranks > 0 ? num_experts / num_ranks : 0;
  Divisor by_local_experts = Divisor(num_local_experts > 0 ? num_local_experts : 1);
  Divisor by_pieces = Divisor(num_pieces() > 0 ? num_pieces() : 1);
  Divisor by_topk = Divisor(num_topk > 0 ? num_topk : 1);
  Divisor by_max_tokens = Divisor(num_max_tokens_per_rank > 0 ? num_max_tokens_per_rank : 1);
  uint32_t first_batch_number = batch_number(num_max_tokens_per_rank);  // see BatchHeader

  // The same sizes for a batch in which no rank has more than this many tokens: num_max_tokens_per_rank, or a smaller
  // power of two.
  constexpr MoeConfig with_bound(int num_tokens) const {
    MoeConfig config = *this;
    config.num_max_tokens_per_rank = num_tokens;
    config.by_max_tokens = Divisor(num_tokens);
    config.first_batch_number = batch_number(num_tokens);
    return config;
  }

  MOE_A2A_HOST_DEVICE constexpr int num_scales() const { return row(DType::kFloat8).num_scales(); }
  // The most routes that can arrive here: every token of every rank, with all of its choices.
  MOE_A2A_HOST_DEVICE constexpr int64_t route_capacity() const {
    return static_cast<int64_t>(num_ranks) * num_max_tokens_per_rank * num_topk;
  }
  MOE_A2A_HOST_DEVICE constexpr int64_t row_capacity() const {
    return static_cast<int64_t>(num_ranks) * num_max_tokens_per_rank;
  }

  MOE_A2A_HOST_DEVICE constexpr DType row_dtype(RowFormat format) const {
    return format == RowFormat::kPlain ? dtype : DType::kFloat8;
  }
  MOE_A2A_HOST_DEVICE constexpr RowLayout row(DType row_dtype) const { return {hidden, row_dtype}; }
  MOE_A2A_HOST_DEVICE constexpr int64_t scales_offset() const { return row(DType::kFloat8).scales_offset(); }
  MOE_A2A_HOST_DEVICE constexpr int64_t row_bytes(DType row_dtype) const { return row(row_dtype).num_bytes(); }
  MOE_A2A_HOST_DEVICE constexpr int64_t row_stride(DType row_dtype) const { return row(row_dtype).stride(); }
  MOE_A2A_HOST_DEVICE constexpr int64_t max_row_stride() const {
    const int64_t own = row_stride(dtype), quantized = row_stride(DType::kFloat8);
    return own > quantized ? own : quantized;
  }

  // ---- LL words: for small batches, which are latency-bound, and for the choices of medium ones

  // Upper limit of num_max_ll_tokens.
  MOE_A2A_HOST_DEVICE constexpr int ll_token_capacity() const {
    if (num_experts > kMaxLlExperts) return 0;
    const int most = num_max_tokens_per_rank < kMaxLlTokens ? num_max_tokens_per_rank : kMaxLlTokens;
    const int fits = kMaxLlChoices / (num_ranks * num_topk);
    return fits < most ? fits : most;
  }
  // The most tokens of a batch whose rows to all other ranks together take no more than `max_bytes`.
  constexpr int num_tokens_in(int64_t max_bytes, DType row_dtype) const {
    const int64_t bytes = (num_ranks - 1) * row_bytes(row_dtype);
    return bytes > 0 ? static_cast<int>(std::min<int64_t>(max_bytes / bytes, kMaxTokensPerRank)) : kMaxTokensPerRank;
  }
  MOE_A2A_HOST_DEVICE constexpr bool sends_ll_choices(int num_tokens) const {
    return num_max_ll_tokens > 0 && num_tokens <= num_max_ll_tokens;
  }
  MOE_A2A_HOST_DEVICE constexpr bool sends_ll_rows(int num_tokens, DType row_dtype) const {
    const int most = row_dtype == DType::kFloat8 ? max_ll_quantized_row_tokens : max_ll_row_tokens;
    return sends_ll_choices(num_tokens) && num_tokens <= most;
  }
  MOE_A2A_HOST_DEVICE constexpr bool returns_ll(int num_tokens) const {
    return sends_ll_choices(num_tokens) && num_tokens <= max_ll_sum_tokens;
  }
  MOE_A2A_HOST_DEVICE constexpr int num_pieces() const { return row(dtype).num_pieces(); }
  // Bytes of `num_dwords` as LL words, in pieces: at most twice the data, and each piece ends on a whole word.
  static constexpr int64_t ll_bytes(int64_t num_dwords, int num_pieces) {
    return (8 * num_dwords + 32 * num_pieces + 127) / 128 * 128;
  }
  // Three dwords per choice, in whole words: 16 or 24 bytes.
  constexpr int64_t ll_choices_stride() const { return (24 * int64_t{num_topk} + 15) / 16 * 16; }
  constexpr int64_t ll_row_stride() const { return ll_bytes(max_row_stride() / 4, num_pieces()); }

  // The number, in a BatchHeader, of an empty batch under this bound.
  static constexpr uint32_t batch_number(int bound) {
    const int exponent = bound > 1 ? std::bit_width(static_cast<uint32_t>(bound - 1)) : 0;
    return (1u << exponent) + exponent;
  }

  // The first violated rule, naming value, limit and argument; empty when all hold. Communicator::violation() has those
  // of rank and num_ranks.
  std::string violation() const;
};

// The default num_max_ll_tokens.
int default_ll_tokens(const MoeConfig& config, const std::string& target);

}  // namespace moe_a2a
