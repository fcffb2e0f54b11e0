// Divisors of the sizes that dispatch divides by, compared with the operator.
#include "comm/divisor.h"

#include <gtest/gtest.h>

#include <random>

#include "moe/moe_config.h"
#include "seed.h"

namespace moe_a2a {
namespace {

TEST(Divisor, DividesLikeTheOperator) {
  std::mt19937 random(test_seed());
  for (int trial = 0; trial < 1000; ++trial) {
    const int value = 1 + static_cast<int>(random() % kMaxExperts), most = kMaxExperts - 1;
    const Divisor divisor(value);
    for (const int n : {0, value - 1, value, most / value * value - 1, most / value * value, most}) {
      if (n >= 0) ASSERT_EQ(divisor.divide(n), n / value) << n << " / " << value;
    }
    const int n = static_cast<int>(random() % kMaxExperts);
    ASSERT_EQ(divisor.divide(n), n / value) << n << " / " << value;
  }
}

}  // namespace
}  // namespace moe_a2a
