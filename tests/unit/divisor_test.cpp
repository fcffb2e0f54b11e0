// Divisors of every size, compared with the operator.
#include "comm/divisor.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>

#include "seed.h"

namespace moe_a2a {
namespace {

TEST(Divisor, DividesLikeTheOperator) {
  std::mt19937 random(test_seed());
  constexpr int kMost = std::numeric_limits<int>::max();
  for (int trial = 0; trial < 1000; ++trial) {
    const int value =
        trial < 8 ? trial % 2 ? trial : kMost - trial : 1 + static_cast<int>(random() % (kMost >> trial % 31));
    const Divisor divisor(value);
    for (const int n : {0, value - 1, value, kMost / value * value - 1, kMost / value * value, kMost,
                        static_cast<int>(random() % kMost), static_cast<int>(random() % (kMost >> trial % 29))}) {
      ASSERT_EQ(divisor.divide(n).quotient, n / value) << n << " / " << value;
      ASSERT_EQ(divisor.divide(n).remainder, n % value) << n << " % " << value;
    }
  }
}

}  // namespace
}  // namespace moe_a2a
