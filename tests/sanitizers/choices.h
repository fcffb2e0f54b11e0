// A small case: random choices of experts, some dropped, with weights that are powers of two, so that float32 holds
// their sums.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

namespace moe_a2a::small_case {

inline constexpr int kRanks = 2, kTokens = 7, kTopk = 3, kExperts = 10;

struct Choices {
  std::vector<int32_t> expert;  // [kTokens, kTopk]
  std::vector<float> weight;
};

// Of a rank's tokens. The same seed gives the same choices, whichever rank draws them.
inline Choices draw(uint64_t seed, int rank) {
  std::mt19937_64 random(seed + rank);
  Choices choices;
  for (int t = 0; t < kTokens; ++t) {
    const int first = static_cast<int>(random() % kExperts);
    for (int k = 0; k < kTopk; ++k) {
      choices.expert.push_back(random() % 5 == 0 ? -1 : (first + 3 * k) % kExperts);
      choices.weight.push_back(static_cast<float>(1 << random() % 3));
    }
  }
  return choices;
}

}  // namespace moe_a2a::small_case
