// Division by a number that the host knows.
#pragma once

#include <cstdint>

#include "arch/attributes.h"

namespace moe_a2a {

// n / value for 0 <= n with n * value < 2^32, in one or two multiplications. A division takes a GPU 25 instructions,
// one after the other, and one of 64 bits 100.
class Divisor {
 public:
  constexpr Divisor() = default;
  constexpr explicit Divisor(uint32_t value) : factor_(((uint64_t{1} << 32) + value - 1) / value) {}

  MOE_A2A_HOST_DEVICE constexpr int32_t divide(int32_t n) const {
    return static_cast<int32_t>(static_cast<uint32_t>(n) * factor_ >> 32);
  }

 private:
  uint64_t factor_ = uint64_t{1} << 32;  // 2^32 / value, rounded up: too large by less than 1 / n
};

}  // namespace moe_a2a
