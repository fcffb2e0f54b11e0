// The numbers that the model's ranks exchange.
#pragma once

namespace moe_a2a {

// Small integers: every sum is exact, so the expected value needs no order of addition.
inline float x_value(int src, int token, int call, int column) {
  return static_cast<float>(1 + column + 256 * (token + 4 * (src + 4 * call)));
}
inline float weight_value(int src, int token, int k) { return static_cast<float>(1 + (src + 2 * token + 3 * k) % 5); }
inline float expert_factor(int expert) { return static_cast<float>(expert + 1); }

}  // namespace moe_a2a
