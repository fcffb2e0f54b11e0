// _core.ExpertParallel and _core.DispatchHandle.
#pragma once

#include "bindings/python.h"

namespace moe_a2a::bindings {

void bind_expert_parallel(pybind11::module_& m);

}  // namespace moe_a2a::bindings
