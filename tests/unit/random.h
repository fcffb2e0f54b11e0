// Random choices of a test.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>

namespace moe_a2a {

class Random {
 public:
  explicit Random(uint64_t seed) : generator_(seed) {}
  int pick(int low, int high) { return std::uniform_int_distribution(low, high)(generator_); }
  void fill(std::byte* bytes, int64_t count) {
    for (int64_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(pick(0, 255));
  }

 private:
  std::mt19937_64 generator_;
};

}  // namespace moe_a2a
