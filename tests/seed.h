// The seed of a random test: printed, and set with MOE_A2A_SEED=<seed>.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>

namespace moe_a2a {

inline uint64_t test_seed() {
  const char* given = std::getenv("MOE_A2A_SEED");
  const uint64_t seed = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
  std::printf("  seed %llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

}  // namespace moe_a2a
