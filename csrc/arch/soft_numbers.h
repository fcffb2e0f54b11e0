// Conversions in plain C++, for targets without instructions for them.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "arch/soft_float8.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

inline constexpr float kFloat8Max = 448.0f;

inline float to_float(float value) { return value; }
inline float to_float(Bfloat16 value) { return std::bit_cast<float>(uint32_t{value.bits} << 16); }
// Branch-free and without the compiler's half type, which calls a function per value where the machine has no
// instruction: loops over a row stay vectorised.
inline float to_float(Half value) {
  const uint32_t sign = uint32_t{value.bits & 0x8000u} << 16;
  const uint32_t magnitude = uint32_t{value.bits & 0x7fffu} << 13;
  const float rebiased = std::bit_cast<float>(magnitude) * 0x1p112f;     // exact, including subnormals
  const uint32_t special = magnitude >= 0x0f800000u ? 0x7f800000u : 0u;  // infinity and NaN
  return std::bit_cast<float>(std::bit_cast<uint32_t>(rebiased) | special | sign);
}

inline float sigmoid(float value) { return 1.0f / (1.0f + std::exp(-value)); }
inline float error_function(float value) { return std::erf(value); }

template <class T>
T from_float(float value);
template <>
inline float from_float<float>(float value) {
  return value;
}
template <>
inline Half from_float<Half>(float value) {  // round to nearest, ties to even
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - 0x38000000u + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  // A subnormal's last bit is 2^-24, as is that of 0.5: the addition rounds it.
  const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x477ff000u ? 0x7c00u : half;                                // rounds up to infinity
  half = magnitude > 0x7f800000u ? 0x7e00u | ((magnitude >> 13) & 0x3ffu) : half;  // NaN stays NaN
  return {static_cast<uint16_t>(half | sign)};
}
template <>
inline Bfloat16 from_float<Bfloat16>(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;  // round to nearest, ties to even
  return {static_cast<uint16_t>(value != value ? 0x7fc0u : rounded)};
}
template <>
inline Float8 from_float<Float8>(float value) {
  return soft_float8(value);
}
inline float to_float(Float8 value) { return soft_to_float(value); }
template <int kCount>
void to_float8(const float (&values)[kCount], float factor, Float8 (&codes)[kCount]) {
  for (int i = 0; i < kCount; ++i) codes[i] = from_float<Float8>(values[i] * factor);
}
inline float larger(float a, float b) { return a > b ? a : b; }
inline uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

}  // namespace moe_a2a::inline MOE_A2A_TARGET
