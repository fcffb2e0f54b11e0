#include "traffic.h"

#include <cstring>
#include <random>

#include "arch/arch.h"

namespace moe_a2a {
namespace {

using Random = std::mt19937_64;

int pick(Random& random, int low, int high) {
  return low + static_cast<int>(random() % static_cast<uint64_t>(high - low + 1));
}

}  // namespace

std::vector<Round> draw_rounds(uint64_t seed, const MoeConfig& config, int num_rounds) {
  Random random(seed);
  std::vector<Round> rounds(num_rounds);
  for (int i = 0; i < num_rounds; ++i) {
    Round& round = rounds[i];
    round.number = i;
    round.layout = static_cast<Layout>(pick(random, 0, 2));
    round.expert_alignment = round.layout == Layout::kExpertMajor ? pick(random, 1, 9) : 1;
    round.quantize = pick(random, 0, 3) == 0;
    round.presummed = pick(random, 0, 3) == 0;
    if (pick(random, 0, 2) == 0) round.first_codec = pick(random, 0, 4);
    // From some 20 blocks on, all that may write lists do.
    round.num_blocks = pick(random, 0, 9) == 0 ? pick(random, 4, 24) : pick(random, 1, 3);
    round.refusing_rank = pick(random, 0, config.num_ranks - 1);
    if (pick(random, 0, 15) == 0) round.end = Round::End::kRelease;
    // Not in consecutive rounds: a rank's next refusal overwrites the text of the previous one.
    if (i % 6 == 5 && config.num_ranks > 1)
      round.end = pick(random, 0, 1) ? Round::End::kRefusedDispatch : Round::End::kRefusedCombine;
    round.opens_second = config.num_buffers > 1 && i + 1 < num_rounds && pick(random, 0, 2) == 0;
  }
  return rounds;
}

float x_value(int rank, int token, int round, int column) {
  return static_cast<float>((rank * 37 + token * 11 + round * 5 + column * 3) % 127 - 63) / 4;
}

float expert_output(int expert, float x) { return x * static_cast<float>(1 + expert % 3); }

Tokens::Tokens(uint64_t seed, const MoeConfig& config, int rank, int round) {
  Random random(seed * 1'000'003 + static_cast<uint64_t>(round) * 64 + rank);
  count = pick(random, 0, 3) == 0 ? 0 : pick(random, 0, config.num_max_tokens_per_rank);
  const bool all_to_one = pick(random, 0, 9) == 0;
  for (int t = 0; t < count; ++t) {
    // Distinct experts, as from a router, so no layout can overflow.
    std::vector<int> experts(config.num_experts);
    for (int e = 0; e < config.num_experts; ++e) experts[e] = e;
    for (int k = 0; k < config.num_topk; ++k) {
      std::swap(experts[k], experts[pick(random, k, config.num_experts - 1)]);
      const bool dropped = pick(random, 0, 5) == 0 || (all_to_one && k > 0);
      topk_idx.push_back(dropped ? -1 : all_to_one ? 0 : experts[k]);
      weights.push_back(static_cast<float>(pick(random, 1, 1000)) / 997);
    }
  }
  const int64_t row_bytes = static_cast<int64_t>(config.hidden) * size_of(config.dtype);
  x.resize(count * row_bytes);
  for (int t = 0; t < count; ++t) {
    for (int c = 0; c < config.hidden; ++c)
      store_element(&x[t * row_bytes], config.dtype, c, x_value(rank, t, round, c));
  }
}

void store_element(std::byte* row, DType dtype, int column, float value) {
  const auto store = [&](auto element) { std::memcpy(row + column * sizeof(element), &element, sizeof(element)); };
  if (dtype == DType::kFloat32) return store(value);
  if (dtype == DType::kFloat16) return store(from_float<Half>(value));
  if (dtype == DType::kBfloat16) return store(from_float<Bfloat16>(value));
  store(from_float<Float8>(value));
}

float load_element(const std::byte* row, DType dtype, int column) {
  const auto load = [&](auto element) {
    std::memcpy(&element, row + column * sizeof(element), sizeof(element));
    return to_float(element);
  };
  if (dtype == DType::kFloat32) return load(float{});
  return dtype == DType::kFloat16 ? load(Half{}) : load(Bfloat16{});
}

float rounded(DType dtype, float value) {
  std::byte element[4];
  store_element(element, dtype, 0, value);
  return load_element(element, dtype, 0);
}

}  // namespace moe_a2a
