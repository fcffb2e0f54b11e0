// Inputs that every rank can compute for all ranks, and the expected results, so ranks need not ask each other.
#pragma once

#include <cstdint>
#include <vector>

#include "moe/args.h"

namespace moe_a2a {

// The work of all ranks in one round, drawn from a seed.
struct Round {
  enum class End { kCombine, kRelease, kRefusedDispatch, kRefusedCombine };

  int number = 0;
  End end = End::kCombine;
  int refusing_rank = 0;
  Layout layout = Layout::kRows;
  int expert_alignment = 1;
  bool quantize = false;
  bool presummed = false;  // each rank weights and sums its experts' outputs itself
  int first_codec = -1;    // of the sums that rank 0 sends; -1: of no rank's
  int num_blocks = 1;
  bool opens_second = false;  // the next round is dispatched before this one is combined

  // Neighbouring ranks send in different codecs.
  LineCodec codec_of(int rank) const {
    return first_codec < 0 ? LineCodec::kNone : static_cast<LineCodec>((first_codec + rank) % 5);
  }
};

std::vector<Round> draw_rounds(uint64_t seed, const MoeConfig& config, int num_rounds);

// The tokens of one rank in one round.
struct Tokens {
  Tokens(uint64_t seed, const MoeConfig& config, int rank, int round);

  int count;
  std::vector<int64_t> topk_idx;  // [count, num_topk]
  std::vector<float> weights;     // [count, num_topk]
  std::vector<std::byte> x;       // [count, hidden] of config.dtype
};

// Small integers over 4, exact in every dtype: source rank, token, round and column in one number.
float x_value(int rank, int token, int round, int column);
// The output of this test's experts for a value.
float expert_output(int expert, float x);

void store_element(std::byte* row, DType dtype, int column, float value);
float load_element(const std::byte* row, DType dtype, int column);
// The nearest value of `dtype`.
float rounded(DType dtype, float value);

}  // namespace moe_a2a
