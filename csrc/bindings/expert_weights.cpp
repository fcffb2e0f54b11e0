#include "bindings/expert_weights.h"

#include <string>

#include "bindings/config.h"
#include "bindings/tensor_gate.h"

namespace moe_a2a::bindings {
namespace {

constexpr int64_t kBlock = 128;  // rows and columns of float8 weights that share a scale

int64_t num_blocks(int64_t size) { return (size + kBlock - 1) / kBlock; }

void check_values(const Place& place, const at::Tensor& w, const char* name, at::ScalarType expected) {
  check_plain(place, w, name);
  if (w.scalar_type() != expected && w.element_size() == 1 && w.is_floating_point()) {
    raise_type(place.rank,
               std::string(name) + " has dtype " + text_of(w.scalar_type()) + ", expected " + text_of(expected),
               std::string("pass (") + name + ", scales)");
  }
  check_dtype(place.rank, w, name, expected);
}

void check_scales(const Place& place, const std::optional<at::Tensor>& scales, const char* name,
                  at::IntArrayRef shape) {
  if (!scales) return;
  check_plain(place, *scales, name);
  if (scales->scalar_type() != at::kFloat) {
    raise_type(place.rank,
               std::string(name) + " have dtype " + text_of(scales->scalar_type()) + ", expected torch.float32",
               "pass float32");
  }
  if (scales->sizes() != shape) {
    raise_value(place.rank,
                std::string(name) + " have shape " + text_of(scales->sizes()) + ", expected " + text_of(shape),
                "pass one per 128 x 128 values");
  }
}

void check_shapes(const Place& place, const ExpertWeights& weights, int64_t num_local_experts, int64_t hidden) {
  const at::Tensor &gate_up = weights.gate_up, &down = weights.down;
  if (gate_up.dim() != 3 || gate_up.size(0) != num_local_experts || gate_up.size(1) == 0 || gate_up.size(1) % 2 != 0 ||
      gate_up.size(2) != hidden) {
    raise_value(place.rank,
                "w_gate_up has shape " + text_of(gate_up.sizes()) + ", expected [num_local_experts=" +
                    std::to_string(num_local_experts) + ", 2 * intermediate, hidden=" + std::to_string(hidden) + "]",
                "pass this rank's experts");
  }
  const int64_t intermediate = gate_up.size(1) / 2, shape[] = {num_local_experts, hidden, intermediate};
  if (down.sizes() != at::IntArrayRef(shape)) {
    raise_value(place.rank, "w_down has shape " + text_of(down.sizes()) + ", expected " + text_of(shape),
                "pass [num_local_experts, hidden, intermediate] to w_gate_up's [.., 2 * intermediate, ..]");
  }
}

void check_expert_weights(int rank, int num_local_experts, int hidden, const at::Device& device,
                          const py::object& dtype, const py::object& float8, const at::Tensor& gate_up,
                          const at::Tensor& down, const std::optional<at::Tensor>& gate_up_scales,
                          const std::optional<at::Tensor>& down_scales) {
  const Place place = {.rank = rank, .device = device};
  check_values(place, gate_up, "w_gate_up", scalar_type(gate_up_scales ? float8 : dtype));
  check_values(place, down, "w_down", scalar_type(down_scales ? float8 : dtype));
  if (gate_up_scales.has_value() != down_scales.has_value()) {
    raise_type(rank,
               "w_gate_up has dtype " + text_of(gate_up.scalar_type()) + " and w_down " + text_of(down.scalar_type()),
               "pass float8 with scales for both or for neither");
  }
  check_shapes(place, {gate_up, down, gate_up_scales, down_scales}, num_local_experts, hidden);
  const int64_t of_hidden = num_blocks(hidden), of_intermediate = num_blocks(down.size(2));
  check_scales(place, gate_up_scales, "w_gate_up's scales", {num_local_experts, 2 * of_intermediate, of_hidden});
  check_scales(place, down_scales, "w_down's scales", {num_local_experts, of_hidden, of_intermediate});
}

}  // namespace

void bind_expert_weights(py::module_& m) { m.def("check_expert_weights", &check_expert_weights); }

}  // namespace moe_a2a::bindings
