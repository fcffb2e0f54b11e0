// The trace exporters as functions of moe_a2a._core.
#pragma once

#include <pybind11/pybind11.h>

namespace moe_a2a::bindings {

void bind_trace_export(pybind11::module_& m);

}  // namespace moe_a2a::bindings
