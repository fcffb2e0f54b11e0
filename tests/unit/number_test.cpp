// Conversions of the CPU target, which the other targets must match, against a slow reference that picks the nearest
// value from a table of all values of a format, ties to the even code.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "arch/arch.h"
#include "seed.h"

namespace moe_a2a {
namespace {

struct Format {
  int exponent_bits, mantissa_bits, bias;
  uint32_t largest_finite;  // code
  bool saturates;           // otherwise infinity follows the largest
  uint32_t nan;

  double value(uint32_t code) const {
    const uint32_t mantissa = code & ((1u << mantissa_bits) - 1), exponent = code >> mantissa_bits;
    const double fraction = std::ldexp(mantissa, -mantissa_bits);
    return exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, static_cast<int>(exponent) - bias);
  }
  uint32_t sign() const { return 1u << (exponent_bits + mantissa_bits); }
  uint32_t behind_largest() const { return saturates ? largest_finite : largest_finite + 1; }
};

constexpr Format kHalfFormat{5, 10, 15, 0x7bff, false, 0x7e00};
constexpr Format kBfloat16Format{8, 7, 127, 0x7f7f, false, 0x7fc0};
constexpr Format kFloat8Format{4, 3, 7, 0x7e, true, 0x7f};

// The code nearest to |x|, x finite.
uint32_t nearest(const Format& format, const std::vector<double>& values, double x) {
  const auto after = std::upper_bound(values.begin(), values.end(), x);
  if (after == values.end()) {
    const double largest = values.back(), next = largest + (largest - values[values.size() - 2]);
    return x < (largest + next) / 2 ? format.largest_finite : format.behind_largest();
  }
  const auto code = static_cast<uint32_t>(after - values.begin()) - 1;
  const double below = x - values[code], above = values[code + 1] - x;
  if (below != above) return below < above ? code : code + 1;
  return code % 2 == 0 ? code : code + 1;
}

template <class T>
void check_rounding(const Format& format) {
  std::vector<double> values;
  for (uint32_t code = 0; code <= format.largest_finite; ++code) values.push_back(format.value(code));
  const auto check = [&](float x) {
    const uint32_t expected =
        nearest(format, values, std::fabs(static_cast<double>(x))) | (std::signbit(x) ? format.sign() : 0);
    EXPECT_EQ(from_float<T>(x).bits, expected) << x;
  };
  // Rounding can only go wrong at a value, at the midpoint of two, or right next to one of these.
  const float infinity = std::numeric_limits<float>::infinity();
  for (uint32_t code = 0; code < format.largest_finite; ++code) {
    const auto low = static_cast<float>(values[code]),
               middle = static_cast<float>((values[code] + values[code + 1]) / 2);
    for (const float x : {low, middle, std::nextafter(low, infinity), std::nextafter(middle, 0.0f),
                          std::nextafter(middle, infinity), std::nextafter(low, 0.0f)}) {
      check(x);
      check(-x);
    }
  }
  const uint64_t seed = test_seed();
  std::mt19937 random(static_cast<unsigned>(seed));
  for (int i = 0; i < 1'000'000; ++i) {
    const float x = std::bit_cast<float>(static_cast<uint32_t>(random()));
    if (std::isfinite(x)) check(x);
  }
  EXPECT_EQ(from_float<T>(infinity).bits, format.behind_largest());
  EXPECT_EQ(from_float<T>(-infinity).bits, format.behind_largest() | format.sign());
  EXPECT_EQ(from_float<T>(std::numeric_limits<float>::quiet_NaN()).bits & ~format.sign(), format.nan);
}

template <class T, class Bits>
void check_widening(const Format& format) {
  for (uint32_t code = 0; code <= format.largest_finite; ++code) {
    EXPECT_EQ(to_float(T{static_cast<Bits>(code)}), format.value(code));
    EXPECT_EQ(to_float(T{static_cast<Bits>(code | format.sign())}), -format.value(code));
  }
  EXPECT_EQ(to_float(T{static_cast<Bits>(format.largest_finite + 1)}), std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(to_float(T{static_cast<Bits>(format.nan)})));
}

TEST(Number, HalfRoundsToNearestEven) { check_rounding<Half>(kHalfFormat); }
TEST(Number, Bfloat16RoundsToNearestEven) { check_rounding<Bfloat16>(kBfloat16Format); }
TEST(Number, Float8RoundsToNearestEvenAndSaturates) { check_rounding<Float8>(kFloat8Format); }
TEST(Number, HalfWidens) { check_widening<Half, uint16_t>(kHalfFormat); }
TEST(Number, Bfloat16Widens) { check_widening<Bfloat16, uint16_t>(kBfloat16Format); }

}  // namespace
}  // namespace moe_a2a
