#include "bindings/experts.h"

#include "bindings/grouped_gemm.h"
#include "bindings/signals.h"
#include "bindings/tensor_gate.h"

namespace moe_a2a::bindings {
namespace {

using Stage = DispatchHandle::Stage;

constexpr Activation kSwiGlu = {.function = Activation::Function::kSilu, .is_gated = true};

at::Tensor empty_sums(const MoeConfig& config, at::Device device, at::ScalarType type) {
  return make_tensor({config.rank, device}, {config.row_capacity(), config.hidden}, type);
}

// A product's counters: the units drawn, and if it sends its rows itself, the tiles stored per row.
int64_t num_counters_of(const PreparedProduct& product, bool sends) {
  return sends ? 1 + int64_t{product.args.num_rows} : 1;
}
void give_counters(PreparedProduct& product, int32_t* counters, bool sends) {
  product.args.next_unit = counters;
  if (sends) product.args.stored_tiles = reinterpret_cast<uint32_t*>(counters + 1);
}

// The product that sends its rows itself, and the receiving half of the combine.
void multiply_and_combine(ExpertParallel& ep, DispatchHandle& handle, const PreparedProduct& product,
                          const GroupedGemmPlace& products, const at::Tensor& combined_x, const LaunchPlace& place) {
  const int num_blocks = combined_x.is_cpu() ? products.num_blocks + 1 : 0;  // 0: all
  if (handle.stage == Stage::kReceived) ep.product_combine_send(handle, product.args, {num_blocks, place.stream});
  ep.combine_recv(handle, combined_x.mutable_data_ptr(), place);  // else a retry: the sums have been sent
}

}  // namespace

at::Tensor run_experts(ExpertParallel& ep, Views& views, DispatchHandle& handle, const ExpertWeights& weights,
                       const ExpertsOptions& options, at::ScalarType type, const LaunchPlace& place) {
  const bool is_float8 = weights.gate_up_scales.has_value();
  const at::ScalarType row_type = weights.gate_up.scalar_type();
  const at::Tensor x = views.all_rows(handle, row_type), offsets = views.expert_offsets(handle);
  const std::optional<at::Tensor> rows = views.first_row_indices(handle, options.num_max_routes), none;
  const auto x_scales = is_float8 ? std::optional(views.all_scales(handle)) : std::nullopt;
  const GroupedGemmPlace products = product_place(ep.member().target, x.device(), 0, place.stream);
  PreparedProduct first =
      prepare_product({x, rows, offsets, weights.gate_up, none, x_scales, weights.gate_up_scales}, kSwiGlu, row_type);
  PreparedProduct second =
      prepare_product({first.out, none, offsets, weights.down, none, first.out_scales, weights.down_scales}, {}, type);
  second.args.follows_product = true;
  const at::Tensor combined_x = checked_out(ep, x.device(), handle.num_tokens, type, options.out);
  const int64_t num_counters = 1 + num_counters_of(second, options.fuses_combine);
  const at::Tensor counters = zeroed_counters(products, x.device(), num_counters);
  first.args.next_unit = counters.mutable_data_ptr<int32_t>();
  give_counters(second, first.args.next_unit + 1, options.fuses_combine);
  const Rows y = {static_cast<const std::byte*>(second.out.const_data_ptr()), ep.config().row_bytes(ep.config().dtype)};
  py::gil_scoped_release unlocked;
  ep.run_product(products, first.args);
  if (!options.fuses_combine) ep.run_product(products, second.args);
  raise_signal_error();  // the peers' combine is refused, and may be repeated
  if (options.fuses_combine) {
    multiply_and_combine(ep, handle, second, products, combined_x, place);
  } else {
    ep.combine(handle, {y, second.out.size(0), false, options.codec}, combined_x.mutable_data_ptr(), place);
  }
  return combined_x;
}

at::Tensor run_product_combine(ExpertParallel& ep, DispatchHandle& handle, const GroupedGemmTensors& second,
                               at::ScalarType type, const std::optional<at::Tensor>& out, const LaunchPlace& place) {
  ep.require(handle, {Stage::kReceived, Stage::kCombineSent}, "experts");
  const at::Device device = second.x.device();
  const at::Tensor combined_x = checked_out(ep, device, handle.num_tokens, type, out, &second.x);
  PreparedProduct product = prepare_product(second, {}, type);
  const GroupedGemmPlace products = product_place(ep.member().target, device, 0, place.stream);
  const at::Tensor counters = zeroed_counters(products, device, num_counters_of(product, true));
  give_counters(product, counters.mutable_data_ptr<int32_t>(), true);
  py::gil_scoped_release unlocked;
  multiply_and_combine(ep, handle, product, products, combined_x, place);
  return combined_x;
}

at::Tensor run_simulated_experts(ExpertParallel& ep, const DispatchHandle& handle, at::Device device,
                                 at::ScalarType type, const SimulatedScales& scales, const LaunchPlace& place) {
  const MoeConfig config = ep.config_of(handle);
  ep.require(handle, {Stage::kReceived}, "simulated_experts");
  if (handle.format != RowFormat::kPlain) {
    raise_type(config.rank, "simulated_experts got a handle of float8 rows",
               "dispatch without quantize, rows of the dtype that this ExpertParallel was made with");
  }
  const ExpertScales checked = checked_scales(config, device, scales.scales, scales.factor);
  const at::Tensor sums = empty_sums(config, device, type);
  py::gil_scoped_release unlocked;
  ep.simulated_experts(handle, checked, sums.mutable_data_ptr(), place);
  return sums;
}

// The result is allocated while the GPU dispatches. If that fails, the caller gives up the dispatch.
at::Tensor run_simulated_layer(ExpertParallel& ep, at::Device device, at::ScalarType type,
                               const DispatchTensors& tensors, const SimulatedScales& scales,
                               const LaunchPlace& place) {
  const MoeConfig& config = ep.config();
  check_dtype(config.rank, tensors.x, "x", type);
  const DispatchInput input = checked_input(ep, device, tensors);
  const CombineInput sums = {.simulated = checked_scales(config, device, scales.scales, scales.factor)};
  py::gil_scoped_release unlocked;
  const auto handle = ep.dispatch(input, Layout::kRows, 1, place);
  const at::Tensor combined_x = checked_out(ep, device, input.num_tokens, type, {});
  ep.combine(*handle, sums, combined_x.mutable_data_ptr(), place);
  return combined_x;
}

std::pair<at::Tensor, at::Tensor> run_weighted_grads(ExpertParallel& ep, const DispatchHandle& handle,
                                                     const at::Tensor& y, const at::Tensor& weights,
                                                     const LaunchPlace& place) {
  const Place here = {ep.config().rank, y.device()};
  const Rows rows = checked_y(ep, y.device(), handle, y, false);
  if (weights.sizes() != y.sizes().slice(0, 1)) {
    raise_value(here.rank,
                "weights has shape " + text_of(weights.sizes()) + ", expected " + text_of(y.sizes().slice(0, 1)),
                "pass one weight per row of y");
  }
  const at::Tensor grad_y = make_tensor(here, y.sizes(), y.scalar_type());
  const at::Tensor grad_weights = make_tensor(here, weights.sizes(), weights.scalar_type());
  const WeightedRows outputs = {rows, weights.const_data_ptr<float>(), y.size(0)};
  py::gil_scoped_release unlocked;
  ep.weighted_grads(handle, outputs, grad_y.mutable_data_ptr(), grad_weights.mutable_data_ptr<float>(), place);
  return {grad_y, grad_weights};
}

}  // namespace moe_a2a::bindings
