// Builds the configuration of an ExpertParallel from Python's arguments.
#pragma once

#include <optional>
#include <string>

#include "bindings/python.h"
#include "moe/moe_config.h"

namespace moe_a2a::bindings {

namespace py = pybind11;

at::ScalarType scalar_type(const py::object& dtype);

// Raises ValueError or TypeError that names the value, the limit, the rank and the argument to change.
MoeConfig make_config(int rank, int num_ranks, int num_experts, int num_topk, int hidden, int num_max_tokens_per_rank,
                      int num_buffers, const py::object& dtype, std::optional<int> num_max_ll_tokens,
                      const std::string& target);

// What Python asks of a configuration without an object that has it.
void bind_config(py::module_& m);

}  // namespace moe_a2a::bindings
