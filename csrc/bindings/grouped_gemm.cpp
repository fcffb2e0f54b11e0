#include "bindings/grouped_gemm.h"

#include <ATen/Parallel.h>

#include <optional>
#include <string>

#include "bindings/clients.h"
#include "bindings/config.h"
#include "bindings/grouped_gemm_arguments.h"
#include "bindings/tensors.h"
#include "moe/experts/run_grouped_gemm.h"

namespace moe_a2a::bindings {
namespace {

struct Results {
  at::Tensor out;
  std::optional<at::Tensor> scales;  // of a float8 out
};

Results make_results(const Place& place, int64_t num_rows, int64_t columns, at::ScalarType type) {
  Results results = {make_tensor(place, {num_rows, columns}, type), {}};
  if (at::elementSize(type) == 1) results.scales = make_tensor(place, {num_rows, (columns + 127) / 128}, at::kFloat);
  return results;
}

const float* floats_of(const std::optional<at::Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr<float>() : nullptr;
}

GroupedGemmArgs to_args(const GroupedGemmTensors& t, const Activation& activation, const Results& results) {
  const auto row_stride = [](const at::Tensor& x) { return x.size(0) > 1 ? x.stride(0) : x.size(1); };
  return {.x = t.x.const_data_ptr(),
          .row_index = t.row_index ? t.row_index->const_data_ptr<int32_t>() : nullptr,
          .expert_offsets = t.expert_offsets.const_data_ptr<int32_t>(),
          .w = t.w.const_data_ptr(),
          .bias = floats_of(t.bias),
          .out = results.out.mutable_data_ptr(),
          .x_scales = floats_of(t.x_scales),
          .w_scales = floats_of(t.w_scales),
          .out_scales = results.scales ? results.scales->mutable_data_ptr<float>() : nullptr,
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

std::pair<at::Tensor, std::optional<at::Tensor>> grouped_gemm(
    const at::Tensor& x, const std::optional<at::Tensor>& row_index, const at::Tensor& expert_offsets,
    const at::Tensor& w, const std::optional<std::string>& activation_name, bool gated, bool interleaved, double alpha,
    std::optional<double> limit, double up_shift, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& x_scales, const std::optional<at::Tensor>& w_scales, const py::object& out_dtype,
    const std::string& target) {
  const at::ScalarType out_type = scalar_type(out_dtype);
  const Activation activation = to_activation({activation_name, gated, interleaved, alpha, limit, up_shift});
  const GroupedGemmTensors tensors = {x, row_index, expert_offsets, w, bias, x_scales, w_scales};
  const Place place = {.rank = kNoRank, .device = x.device(), .owner = "x"};
  check_arguments(place, tensors, activation, out_type);
  const int64_t columns = activation.is_gated ? w.size(1) / 2 : w.size(1);
  const Results results = make_results(place, tensors.num_rows(), columns, out_type);
  if (tensors.num_rows() == 0) return {results.out, results.scales};

  GroupedGemmArgs args = to_args(tensors, activation, results);
  at::Tensor next_unit;
  if (!x.is_cpu()) {
    next_unit = at::zeros({1}, expert_offsets.options());
    args.next_unit = next_unit.mutable_data_ptr<int32_t>();
  }
  const GroupedGemmPlace where = {.target = target,
                                  .device = x.is_cpu() ? 0 : x.device().index(),
                                  .num_blocks = x.is_cpu() ? at::get_num_threads() : 0,
                                  .stream = current_stream(x.device())};
  py::gil_scoped_release unlocked;
  run_grouped_gemm(where, args);
  return {results.out, results.scales};
}

}  // namespace

void register_grouped_gemm(py::module_& m) { m.def("grouped_gemm", &grouped_gemm); }

}  // namespace moe_a2a::bindings
