// The Python module's grouped_gemm().
#pragma once

#include "bindings/python.h"

namespace moe_a2a::bindings {

void register_grouped_gemm(py::module_& m);

}  // namespace moe_a2a::bindings
