// Float8 as e4m3fn in plain C++, for machines without instructions for it: 4 exponent bits (bias 7), 3 mantissa bits,
// no infinity, 0x7f is NaN.
#pragma once

#include <bit>
#include <cstdint>

#include "arch/number.h"

namespace moe_a2a {

// Rounds to nearest, ties to even; values beyond 448 saturate. Branch-free: loops over a row stay vectorised.
MOE_A2A_HOST_DEVICE Float8 soft_float8(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 24) & 0x80u, magnitude = bits & 0x7fffffffu;
  const uint32_t normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
  // A subnormal's last bit is 2^-9, as is that of 2^14: the addition rounds it.
  const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0x1p14f) - 0x46800000u;
  const uint32_t is_normal = 0u - uint32_t{magnitude >= 0x3c800000u};  // a mask: compilers make branches of a choice
  const uint32_t encoded = subnormal ^ ((subnormal ^ normal) & is_normal), largest = 0x7eu;
  const uint32_t is_nan = magnitude > 0x7f800000u ? 1u : 0u;
  return {static_cast<uint8_t>((encoded < largest ? encoded : largest) | is_nan | sign)};
}

MOE_A2A_HOST_DEVICE float soft_to_float(Float8 value) {
  const uint32_t magnitude = uint32_t{value.bits & 0x7fu} << 20;
  const float rebiased = std::bit_cast<float>(magnitude) * 0x1p120f;  // exact, subnormals too
  const uint32_t bits = magnitude == 0x07f00000u ? 0x7fc00000u : std::bit_cast<uint32_t>(rebiased);
  return std::bit_cast<float>(bits | uint32_t{value.bits & 0x80u} << 24);
}

}  // namespace moe_a2a
