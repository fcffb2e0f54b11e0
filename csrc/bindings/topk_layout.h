// deep_ep's get_dispatch_layout().
#pragma once

#include "bindings/python.h"

namespace moe_a2a::bindings {

void bind_topk_layout(py::module_& m);

}  // namespace moe_a2a::bindings
