// The activations of grouped_gemm_args.h, on fp32 sums.
#pragma once

#include "arch/arch.h"
#include "moe/experts/grouped_gemm_args.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

MOE_A2A_DEVICE float silu(float x) { return x * sigmoid(x); }
struct ScaledSilu {
  float alpha;
  MOE_A2A_DEVICE float operator()(float x) const { return x * sigmoid(alpha * x); }
};
MOE_A2A_DEVICE float gelu(float x) { return 0.5f * x * (1.0f + error_function(x * 0.70710678f)); }
// 0.5 * (1 + tanh(y)) is sigmoid(2 * y).
MOE_A2A_DEVICE float gelu_tanh(float x) { return x * sigmoid(x * (1.5957691f + 0.071354814f * x * x)); }
MOE_A2A_DEVICE float relu2(float x) { return x > 0 ? x * x : x == x ? 0.0f : x; }  // NaN stays NaN

// Calls use(f). The function is chosen at run time, which costs little next to a product; call it around a loop.
template <class Use>
MOE_A2A_DEVICE void with_function(const Activation& activation, Use use) {
  using Function = Activation::Function;
  switch (activation.function) {
    case Function::kNone:
      return use([](float x) { return x; });
    case Function::kSilu:
      return use(ScaledSilu{activation.alpha});
    case Function::kGelu:
      return use([](float x) { return gelu(x); });
    case Function::kGeluTanh:
      return use([](float x) { return gelu_tanh(x); });
    case Function::kRelu2:
      return use([](float x) { return relu2(x); });
  }
}

// Comparisons rather than min and max: NaN stays NaN.
template <class Function>
MOE_A2A_DEVICE float gated(const Activation& activation, Function f, float gate, float up) {
  const float limit = activation.limit;
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  return f(gate) * (up + activation.up_shift);
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
