// The sizes that all ranks agree on when an ExpertParallel is made.
#pragma once

#include <cstdint>
#include <string>

#include "symmetric_memory/heap_view.h"
#include "target/number.h"

namespace moe_a2a {

// The payload of a signal holds a number of tokens (signal.h), one value of it means "refused".
inline constexpr int kMaxTokensPerRank = (1 << 20) - 2;
// An entry of the routing table holds an expert in 16 bits, and in as many its place in a chunk of tokens.
inline constexpr int kMaxExperts = 65535;
inline constexpr int kMaxTopk = 64;
// Length of the values that share one scale in a float8 row.
inline constexpr int kScaleBlock = 128;
// Rows of small batches are cut: into so many pieces at most, as long as a batch has so many of them at most.
inline constexpr int kMaxPieces = 16;
inline constexpr int kMaxPiecesOfBatch = 512;

struct MoeConfig {
  int rank = 0;
  int num_ranks = 1;
  int num_experts = 0;
  int num_topk = 0;
  int hidden = 0;
  int num_max_tokens_per_rank = 0;
  int num_buffers = 2;
  DType dtype = DType::kBfloat16;

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

  // Pieces into which each row of a batch of so many tokens is cut: few whole rows would leave most warps without work.
  // Sender and receiver must agree on it, so it depends on nothing but sizes that both know.
  MOE_A2A_HOST_DEVICE constexpr int num_pieces(int num_tokens) const {
    const int most = num_scales() < kMaxPieces ? num_scales() : kMaxPieces;
    const int wanted = num_tokens > 0 ? kMaxPiecesOfBatch / num_tokens : 1;
    const int count = wanted < 1 ? 1 : wanted < most ? wanted : most;
    const int length = piece_length(count);
    return (hidden + length - 1) / length;
  }
  // Values in a piece (the last may have fewer): whole scale blocks, so that no two pieces share a scale.
  MOE_A2A_HOST_DEVICE constexpr int piece_length(int num_pieces) const {
    return (num_scales() + num_pieces - 1) / num_pieces * kScaleBlock;
  }
  // Pieces of the largest batch.
  MOE_A2A_HOST_DEVICE constexpr int64_t piece_capacity() const {
    const int64_t pieces = static_cast<int64_t>(num_max_tokens_per_rank) * kMaxPieces;
    const int64_t cut = pieces < kMaxPiecesOfBatch ? pieces : kMaxPiecesOfBatch;
    return cut > num_max_tokens_per_rank ? cut : num_max_tokens_per_rank;
  }

  // The first rule that does not hold, in words that name value, limit and argument; empty when all hold.
  std::string violation() const;
};

}  // namespace moe_a2a
