#include "bindings/grouped_gemm.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "bindings/clients.h"
#include "bindings/config.h"
#include "bindings/grouped_gemm_arguments.h"
#include "bindings/signals.h"
#include "bindings/tensors.h"
#include "bindings/unlocked.h"

namespace moe_a2a::bindings {
namespace {

const float* floats_of(const std::optional<at::Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr<float>() : nullptr;
}

GroupedGemmArgs to_args(const GroupedGemmTensors& t, const Activation& activation, const PreparedProduct& results) {
  const auto row_stride = [](const at::Tensor& x) { return x.size(0) > 1 ? x.stride(0) : x.size(1); };
  return {.x = t.x.const_data_ptr(),
          .row_index = t.row_index ? t.row_index->const_data_ptr<int32_t>() : nullptr,
          .expert_offsets = t.expert_offsets.const_data_ptr<int32_t>(),
          .w = t.w.const_data_ptr(),
          .bias = floats_of(t.bias),
          .out = results.out.mutable_data_ptr(),
          .x_scales = floats_of(t.x_scales),
          .w_scales = floats_of(t.w_scales),
          .out_scales = results.out_scales ? results.out_scales->mutable_data_ptr<float>() : nullptr,
          .x_stride = row_stride(t.x),
          .x_scales_stride = t.x_scales ? row_stride(*t.x_scales) : 0,
          .num_experts = static_cast<int32_t>(t.w.size(0)),
          .num_x_rows = static_cast<int32_t>(t.x.size(0)),
          .num_rows = static_cast<int32_t>(t.num_rows()),
          .num_columns = static_cast<int32_t>(results.out.size(1)),
          .depth = static_cast<int32_t>(t.x.size(1)),
          .dtype = to_dtype(t.x.scalar_type(), "x", kNoRank),
          .out_dtype = to_dtype(results.out.scalar_type(), "out", kNoRank),
          .activation = activation};
}

}  // namespace

PreparedProduct prepare_product(const GroupedGemmTensors& tensors, const Activation& activation,
                                at::ScalarType out_type) {
  const Place place = {.rank = kNoRank, .device = tensors.x.device(), .owner = "x"};
  check_arguments(place, tensors, activation, out_type);
  const int64_t num_rows = tensors.num_rows(), columns = tensors.w.size(1) / (activation.is_gated ? 2 : 1);
  PreparedProduct product;
  product.out = make_tensor(place, {num_rows, columns}, out_type);
  if (at::elementSize(out_type) == 1) {
    product.out_scales = make_tensor(place, {num_rows, (columns + 127) / 128}, at::kFloat);
  }
  product.args = to_args(tensors, activation, product);
  return product;
}

GroupedGemmPlace product_place(const std::string& target, const at::Device& device, int num_blocks, void* stream) {
  return {.target = target,
          .device = device.is_cpu() ? 0 : device.index(),
          .num_blocks = num_blocks == 0 && device.is_cpu() ? at::get_num_threads() : num_blocks,
          .stream = stream};
}

at::Tensor zeroed_counters(const GroupedGemmPlace& place, const at::Device& device, int64_t num) {
  const at::Tensor counters = make_tensor({.rank = kNoRank, .device = device}, {num}, at::kInt);
  const Unlocked unlocked;  // a thread's first product loads its kernels, which may wait for those that run
  clear(place, counters.mutable_data_ptr(), counters.nbytes());
  return counters;
}

namespace {

std::pair<at::Tensor, std::optional<at::Tensor>> grouped_gemm(
    const at::Tensor& x, const std::optional<at::Tensor>& row_index, const at::Tensor& expert_offsets,
    const at::Tensor& w, const std::optional<std::string>& activation_name, bool gated, bool interleaved, double alpha,
    std::optional<double> limit, double up_shift, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& x_scales, const std::optional<at::Tensor>& w_scales, const py::object& out_dtype,
    const std::string& target, int num_blocks, const std::vector<TracedExperts>& traced) {
  const Activation activation = to_activation({activation_name, gated, interleaved, alpha, limit, up_shift});
  const GroupedGemmTensors tensors = {x, row_index, expert_offsets, w, bias, x_scales, w_scales};
  PreparedProduct product = prepare_product(tensors, activation, scalar_type(out_dtype));
  if (tensors.num_rows() == 0) return {product.out, product.out_scales};
  const GroupedGemmPlace where = product_place(target, x.device(), num_blocks, current_stream(x.device()));
  const at::Tensor counters = zeroed_counters(where, x.device(), 1);
  product.args.next_unit = counters.mutable_data_ptr<int32_t>();
  const auto owner = std::find_if(traced.begin(), traced.end(), [&](const TracedExperts& experts) {
    return experts.ep->owns(product.args.expert_offsets);
  });
  py::gil_scoped_release unlocked;
  if (owner != traced.end()) {
    owner->ep->run_product(where, product.args);
  } else {
    run_grouped_gemm(where, product.args);
  }
  raise_signal_error();
  return {product.out, product.out_scales};
}

}  // namespace

void bind_grouped_gemm(py::module_& m) {
  py::class_<TracedExperts>(m, "TracedExperts");
  m.def("grouped_gemm", &grouped_gemm);
}

}  // namespace moe_a2a::bindings
