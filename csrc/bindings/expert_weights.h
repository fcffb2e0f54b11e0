// Checks the weights of a rank's SwiGLU experts; see moe_a2a/expert_weights.py.
#pragma once

#include <optional>

#include "bindings/python.h"

namespace moe_a2a::bindings {

// Either both have scales, and are float8, or neither.
struct ExpertWeights {
  const at::Tensor &gate_up, &down;
  const std::optional<at::Tensor>&gate_up_scales, &down_scales;
};

void bind_expert_weights(py::module_& m);

}  // namespace moe_a2a::bindings
