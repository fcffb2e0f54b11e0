#pragma once

#include "bindings/python.h"

namespace moe_a2a::bindings {

void bind_collectives(pybind11::module_& m);

}  // namespace moe_a2a::bindings
