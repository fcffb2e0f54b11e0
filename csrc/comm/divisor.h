// Division by a number that the host knows.
#pragma once

#include <bit>
#include <cstdint>

#include "arch/attributes.h"

namespace moe_a2a {

struct Division {
  int32_t quotient, remainder;
};

// By 1 <= value < 2^31, in a multiplication and a shift (Granlund and Montgomery, "Division by invariant integers using
// multiplication", 1994). A division takes a GPU 25 instructions, one after the other, and one of 64 bits 100.
class Divisor {
 public:
  constexpr Divisor() = default;
  constexpr explicit Divisor(uint32_t value)
      : value_(value),
        shift_(31 + std::bit_width(value - 1)),
        factor_(static_cast<uint32_t>(((uint64_t{1} << shift_) + value - 1) / value)) {}

  // Of 0 <= n < 2^31.
  MOE_A2A_HOST_DEVICE constexpr Division divide(int32_t n) const {
    const auto number = static_cast<uint32_t>(n);
    const auto quotient = static_cast<uint32_t>(uint64_t{number} * factor_ >> shift_);
    return {static_cast<int32_t>(quotient), static_cast<int32_t>(number - quotient * value_)};
  }

 private:
  uint32_t value_ = 1;
  int shift_ = 31;                       // 31 + ceil(log2(value))
  uint32_t factor_ = uint32_t{1} << 31;  // 2^shift / value, rounded up
};

}  // namespace moe_a2a
