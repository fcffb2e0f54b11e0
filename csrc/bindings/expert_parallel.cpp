#include "bindings/expert_parallel.h"

#include <array>

#include "bindings/clients.h"
#include "bindings/config.h"
#include "bindings/experts.h"
#include "bindings/grouped_gemm.h"
#include "bindings/recv_topk.h"
#include "bindings/tensor_gate.h"
#include "bindings/tensors.h"
#include "bindings/views.h"
#include "moe/link_floor.h"

namespace moe_a2a::bindings {
namespace {

using OptionalTensor = std::optional<at::Tensor>;
using Handle = std::shared_ptr<DispatchHandle>;
using Stage = DispatchHandle::Stage;

PushBy to_push_by(const std::string& name) {
  if (name == "warp_sender") return PushBy::kWarpSender;
  if (name == "warp_stores") return PushBy::kWarpStores;
  if (name == "block_stores") return PushBy::kBlockStores;
  throw py::value_error("by=\"" + name + "\" is unknown; pass \"warp_sender\", \"warp_stores\" or \"block_stores\"");
}

class Core : public ClientCore {
 public:
  Core(const std::shared_ptr<ExpertParallel>& ep, const std::shared_ptr<Communicator>& comm, bool owns_comm,
       at::ScalarType type, at::Device device)
      : ClientCore(ep, comm, owns_comm, device), type_(type), views_(std::make_unique<Views>(ep, device)) {}

  std::shared_ptr<ExpertParallel> ep() const { return std::static_pointer_cast<ExpertParallel>(open()); }

  Handle dispatch_send(const at::Tensor& x, const at::Tensor& topk_idx, const OptionalTensor& topk_weights,
                       const OptionalTensor& x_scales, bool mx_scales, bool quantize, int64_t num_max_tokens_per_rank,
                       int num_blocks) {
    const auto core = ep();
    const LaunchPlace place = where(num_blocks);
    const DispatchInput input = checked_input(
        *core, device_, {x, topk_idx, topk_weights, x_scales, quantize, mx_scales, num_max_tokens_per_rank});
    py::gil_scoped_release unlocked;
    return core->dispatch_send(input, place);
  }

  Handle dispatch(const at::Tensor& x, const at::Tensor& topk_idx, const OptionalTensor& topk_weights,
                  const OptionalTensor& x_scales, bool mx_scales, bool quantize, int64_t num_max_tokens_per_rank,
                  int layout, int expert_alignment, int num_blocks) {
    const auto core = ep();
    const LaunchPlace place = where(num_blocks);
    const DispatchInput input = checked_input(
        *core, device_, {x, topk_idx, topk_weights, x_scales, quantize, mx_scales, num_max_tokens_per_rank});
    py::gil_scoped_release unlocked;
    return core->dispatch(input, static_cast<Layout>(layout), expert_alignment, place);
  }

  void dispatch_recv(const Handle& handle, int layout, int expert_alignment, int num_blocks) {
    const LaunchPlace place = where(num_blocks);
    const auto core = ep();
    py::gil_scoped_release unlocked;
    core->dispatch_recv(*handle, static_cast<Layout>(layout), expert_alignment, place);
  }

  // (expert_x, its scales or None) in the expert_major and masked layouts; in the rows layout (recv_x, its scales or
  // None), without gaps between rows, those that did not land uninitialised. scales_by_column: in the masked layout,
  // the rows of an expert are adjacent in memory. given: such tensors, to write to.
  using Gathered = std::pair<at::Tensor, OptionalTensor>;
  Gathered gather_rows(const Handle& handle, at::ScalarType row_type, int num_blocks, bool scales_by_column,
                       const std::optional<Gathered>& given) {
    const auto core = ep();
    core->require(*handle, {Stage::kReceived}, handle->layout == Layout::kRows ? "contiguous_rows" : "expert_x");
    check_row_type(*handle, row_type);
    const Gathered out = given ? *given : empty_rows(*handle, row_type, scales_by_column);
    const LaunchPlace place = where(num_blocks);
    py::gil_scoped_release unlocked;
    core->gather_rows(*handle, out.first.mutable_data_ptr(),
                      out.second ? out.second->mutable_data_ptr<float>() : nullptr, scales_by_column, place);
    return out;
  }
  Gathered empty_rows(const DispatchHandle& handle, at::ScalarType row_type, bool scales_by_column) {
    const MoeConfig config = ep()->config_of(handle);
    std::vector<int64_t> shape = {views_->capacity(handle), config.hidden};
    if (handle.layout == Layout::kRows) shape[0] = config.row_capacity();
    if (handle.layout == Layout::kMasked) shape = {config.num_local_experts, config.row_capacity(), config.hidden};
    const at::Tensor expert_x = make_tensor({config.rank, device_}, shape, row_type);
    if (handle.format == RowFormat::kPlain) return {expert_x, std::nullopt};
    shape.back() = config.num_scales();
    if (!scales_by_column) return {expert_x, make_tensor({config.rank, device_}, shape, at::kFloat)};
    std::swap(shape[1], shape[2]);
    return {expert_x, make_tensor({config.rank, device_}, shape, at::kFloat).transpose(1, 2)};
  }

  std::pair<at::Tensor, at::Tensor> recv_topk(const Handle& handle, const TopkIds& wanted) {
    return run_recv_topk(*ep(), *handle, device_, wanted, where(0));
  }
  PackedTopk packed_topk(const Handle& handle, int64_t num_rows, const TopkIds& wanted) {
    return run_packed_topk(*ep(), *handle, device_, num_rows, wanted, where(0));
  }

  // weights: float32, of every rank's tokens, [R * T, K].
  void set_term_weights(const Handle& handle, const at::Tensor& weights) {
    const auto core = ep();
    const Place here = {core->config().rank, device_};
    check_plain(here, weights, "weights");
    check_dtype(here.rank, weights, "weights", at::kFloat);
    check_contiguous(here.rank, weights, "weights");
    const LaunchPlace place = where(0);
    py::gil_scoped_release unlocked;
    core->set_term_weights(*handle, weights.const_data_ptr<float>(), place);
  }

  at::Tensor simulated_experts(const Handle& handle, const OptionalTensor& scales, double factor) {
    return run_simulated_experts(*ep(), *handle, device_, type_, {scales, factor}, where(0));
  }
  at::Tensor simulated_layer(const at::Tensor& x, const at::Tensor& topk_idx, const OptionalTensor& topk_weights,
                             const OptionalTensor& scales, double factor) {
    const OptionalTensor no_x_scales;
    const DispatchTensors tensors = {x, topk_idx, topk_weights, no_x_scales};
    return run_simulated_layer(*ep(), device_, type_, tensors, {scales, factor}, where(0));
  }
  std::pair<at::Tensor, at::Tensor> weighted_grads(const at::Tensor& y, const at::Tensor& weights,
                                                   const Handle& handle) {
    return run_weighted_grads(*ep(), *handle, y, weights, where(0));
  }

  // sum_index: of packed_topk(), if y holds packed sums.
  void combine_send(const at::Tensor& y, const Handle& handle, bool presummed, int codec, int num_blocks,
                    const OptionalTensor& sum_index) {
    const auto core = ep();
    core->require(*handle, {Stage::kReceived, Stage::kCombineSent}, "combine");
    if (handle->stage == Stage::kCombineSent) return;  // a retry: the sums have been sent
    const LaunchPlace place = where(num_blocks);
    const CombineInput input = combine_input(*core, *handle, y, presummed, codec, sum_index);
    py::gil_scoped_release unlocked;
    core->combine_send(*handle, input, place);
  }

  at::Tensor combine(const at::Tensor& y, const Handle& handle, bool presummed, int codec, const OptionalTensor& out,
                     int num_blocks, const OptionalTensor& sum_index) {
    const auto core = ep();
    core->require(*handle, {Stage::kReceived, Stage::kCombineSent}, "combine");
    const LaunchPlace place = where(num_blocks);
    const CombineInput input = combine_input(*core, *handle, y, presummed, codec, sum_index);
    const at::Tensor combined_x = checked_out(*core, device_, handle->num_tokens, type_, out, &y);
    py::gil_scoped_release unlocked;
    core->combine(*handle, input, combined_x.mutable_data_ptr(), place);
    return combined_x;
  }

  // (max_tokens, dispatch_blocks, combine_blocks), ascending.
  void set_launch_table(const std::vector<std::array<int, 3>>& rows) {
    std::vector<LaunchStep> steps;
    for (const auto& [max_tokens, dispatch, combine] : rows) steps.push_back({max_tokens, dispatch, combine});
    ep()->set_launch_table(LaunchTable(std::move(steps)));
  }
  // Blocks of (a dispatch, a combine) when the call does not say.
  std::pair<int, int> blocks_for(int num_tokens) const {
    return {ep()->dispatch_blocks(num_tokens), ep()->combine_blocks(num_tokens)};
  }

  void push_rows(const at::Tensor& x, const at::Tensor& pushes, const std::string& by, int num_blocks) {
    const LaunchPlace place = where(num_blocks);
    const auto core = ep();
    const PushedRows rows = checked_push(core->config(), device_, x, pushes);
    const PushBy how = to_push_by(by);
    py::gil_scoped_release unlocked;
    core->push_rows(rows.x, rows.num_rows, rows.row_bytes, rows.pushes, how, place);
  }

  // Tells the peers that this rank's call has raised `why`, so that none waits for it. `num_before`: num_dispatches()
  // before the call.
  void tell_dispatch_failed(const std::string& why, uint64_t num_before) {
    const auto core = ep();
    const LaunchPlace place = where(0);
    py::gil_scoped_release unlocked;
    core->num_dispatches() == num_before ? core->refuse_dispatch(why, place) : core->give_up_newest(why, place);
  }
  void tell_combine_failed(const Handle& handle, const std::string& why) {
    const auto core = ep();
    const LaunchPlace place = where(0);
    py::gil_scoped_release unlocked;
    core->refuse_combine(handle.get(), why, place);
  }
  uint64_t num_dispatches() const { return ep()->num_dispatches(); }

  at::Tensor combine_recv(const Handle& handle, const OptionalTensor& out, int num_blocks) {
    const LaunchPlace place = where(num_blocks);
    const auto core = ep();
    core->require(*handle, {Stage::kCombineSent}, "combine_recv");
    const at::Tensor combined_x = checked_out(*core, device_, handle->num_tokens, type_, out);
    py::gil_scoped_release unlocked;
    core->combine_recv(*handle, combined_x.mutable_data_ptr(), place);
    return combined_x;
  }

  // Whether the sums of a batch return as LL words, if no other rank's is larger.
  bool returns_ll(int num_tokens) const { return ep()->config().returns_ll(num_tokens); }
  bool can_send_with_product(const Handle& handle) const { return ep()->can_send_with_product(*handle); }

  at::Tensor experts(const Handle& handle, const at::Tensor& w_gate_up, const at::Tensor& w_down,
                     const OptionalTensor& w_gate_up_scales, const OptionalTensor& w_down_scales,
                     int64_t num_max_routes, bool fuses_combine, int codec, const OptionalTensor& out, int num_blocks) {
    const auto core = ep();
    core->require(*handle, {Stage::kReceived, Stage::kCombineSent}, "experts");
    check_row_type(*handle, w_gate_up.scalar_type());
    const ExpertWeights weights = {w_gate_up, w_down, w_gate_up_scales, w_down_scales};
    const ExpertsOptions options = {num_max_routes, fuses_combine, static_cast<LineCodec>(codec), out};
    return run_experts(*core, *views_, *handle, weights, options, type_, where(num_blocks));
  }
  at::Tensor product_combine(const at::Tensor& inner, const OptionalTensor& inner_scales,
                             const at::Tensor& expert_offsets, const at::Tensor& w_down,
                             const OptionalTensor& w_down_scales, const Handle& handle, const OptionalTensor& out,
                             int num_blocks) {
    const GroupedGemmTensors second = {inner, {}, expert_offsets, w_down, {}, inner_scales, w_down_scales};
    return run_product_combine(*ep(), *handle, second, type_, out, where(num_blocks));
  }

  // why: what peers that combine raise; empty: that this rank has released the handle.
  void release(const Handle& handle, const std::string& why) {
    if (!views_) return;  // closed: nothing is held any more
    const LaunchPlace place = where(0);
    const auto core = ep();
    py::gil_scoped_release unlocked;
    core->release(*handle, place, why);
  }

  // For a handle that has been received and whose rows may still be read.
  Views& views(const Handle& handle) {
    ep()->require(*handle, {Stage::kReceived, Stage::kCombineSent}, "a view of the handle");
    return *views_;
  }

  void close() override {
    views_.reset();
    ClientCore::close();
  }

  at::Tensor recv_x(const Handle& handle, at::ScalarType row_type) {
    check_row_type(*handle, row_type);
    return views(handle).recv_x(*handle, row_type);
  }

 private:
  // Python can set the attribute DispatchHandle.row_dtype.
  void check_row_type(const DispatchHandle& handle, at::ScalarType row_type) const {
    const MoeConfig& config = ep()->config();
    if (to_dtype(row_type, "handle.row_dtype", config.rank) == config.row_dtype(handle.format)) return;
    raise_type(config.rank, "handle.row_dtype is " + text_of(row_type) + ", not that of the rows",
               "leave it as dispatch() has set it");
  }

  CombineInput combine_input(const ExpertParallel& core, const DispatchHandle& handle, const at::Tensor& y,
                             bool presummed, int codec, const OptionalTensor& sum_index) const {
    const bool is_packed = presummed && sum_index.has_value();
    const Rows rows = checked_y(core, device_, handle, y, presummed, is_packed);
    if (is_packed) keep_for_current_stream(*sum_index);  // the caller, who may use another stream, does not have it
    return {rows, y.numel() / core.config().hidden, presummed, static_cast<LineCodec>(codec),
            is_packed ? sum_index->const_data_ptr<int32_t>() : nullptr};
  }
  LaunchPlace where(int num_blocks) const { return {.num_blocks = num_blocks, .stream = current_stream(device_)}; }

  at::ScalarType type_;
  std::unique_ptr<Views> views_;  // null once closed
};

template <at::Tensor (Views::*kView)(const DispatchHandle&)>
at::Tensor view_of(Core& core, const Handle& handle) {
  return (core.views(handle).*kView)(*handle);
}

void bind_calls(py::class_<Core, ClientCore>& core) {
  core.def("dispatch_send", &Core::dispatch_send)
      .def("dispatch", &Core::dispatch)
      .def("dispatch_recv", &Core::dispatch_recv)
      .def(
          "gather_rows",
          [](Core& core, const Handle& handle, const py::object& row_dtype, int num_blocks, bool scales_by_column,
             const std::optional<Core::Gathered>& given) {
            return core.gather_rows(handle, scalar_type(row_dtype), num_blocks, scales_by_column, given);
          },
          py::arg("handle"), py::arg("row_dtype"), py::arg("num_blocks"), py::arg("scales_by_column") = false,
          py::arg("given") = py::none())
      .def(
          "recv_topk",
          [](Core& core, const Handle& handle, const py::object& id_dtype, int64_t first_expert,
             std::optional<int64_t> no_expert) {
            return core.recv_topk(handle, {scalar_type(id_dtype), first_expert, no_expert});
          },
          py::arg("handle"), py::arg("id_dtype"), py::arg("first_expert"), py::arg("no_expert"))
      .def(
          "packed_topk",
          [](Core& core, const Handle& handle, int64_t num_rows, const py::object& id_dtype, int64_t first_expert,
             std::optional<int64_t> no_expert) {
            return core.packed_topk(handle, num_rows, {scalar_type(id_dtype), first_expert, no_expert});
          },
          py::arg("handle"), py::arg("num_rows"), py::arg("id_dtype"), py::arg("first_expert"), py::arg("no_expert"))
      .def("set_term_weights", &Core::set_term_weights)
      .def("simulated_experts", &Core::simulated_experts)
      .def("simulated_layer", &Core::simulated_layer)
      .def("weighted_grads", &Core::weighted_grads)
      .def("combine", &Core::combine, py::arg("y"), py::arg("handle"), py::arg("presummed"), py::arg("codec"),
           py::arg("out"), py::arg("num_blocks"), py::arg("sum_index") = py::none())
      .def("returns_ll", &Core::returns_ll)
      .def("combine_send", &Core::combine_send)
      .def("combine_recv", &Core::combine_recv)
      .def("can_send_with_product", &Core::can_send_with_product)
      .def("experts", &Core::experts)
      .def("product_combine", &Core::product_combine)
      .def("tell_dispatch_failed", &Core::tell_dispatch_failed)
      .def("tell_combine_failed", &Core::tell_combine_failed)
      .def_property_readonly("num_dispatches", &Core::num_dispatches)
      .def("release", &Core::release, py::arg("handle"), py::arg("why") = "")
      .def("set_launch_table", &Core::set_launch_table)
      .def("blocks_for", &Core::blocks_for)
      .def("push_rows", &Core::push_rows);
}

void bind_views(py::class_<Core, ClientCore>& core) {
  core.def("recv_x", [](Core& core, const Handle& handle,
                        const py::object& row_dtype) { return core.recv_x(handle, scalar_type(row_dtype)); })
      .def("capacity", [](Core& core, const Handle& handle) { return core.views(handle).capacity(*handle); })
      .def("recv_x_scales", &view_of<&Views::recv_x_scales>)
      .def("expert_offsets", &view_of<&Views::expert_offsets>)
      .def("expert_counts", &view_of<&Views::expert_counts>)
      .def("landed_rows", &view_of<&Views::landed_rows>)
      .def("landed_offsets", &view_of<&Views::landed_offsets>)
      .def("term_positions", &view_of<&Views::term_positions>)
      .def("term_weights", &view_of<&Views::term_weights>)
      .def("num_recv_tokens_per_rank", &view_of<&Views::num_recv_tokens_per_rank>)
      .def("expert_row_index", &view_of<&Views::expert_row_index>)
      .def("route_weights", &view_of<&Views::route_weights>)
      .def("route_src_rank", &view_of<&Views::route_src_rank>)
      .def("route_src_token_idx", &view_of<&Views::route_src_token_idx>);
}

}  // namespace

void bind_expert_parallel(py::module_& m) {
  py::class_<DispatchHandle, Handle>(m, "DispatchHandle")
      .def_readonly("buffer", &DispatchHandle::buffer)
      .def_readonly("num_tokens", &DispatchHandle::num_tokens)
      .def_readonly("num_max_tokens_per_rank", &DispatchHandle::num_max_tokens_per_rank)
      .def_property_readonly("layout", [](const DispatchHandle& handle) { return static_cast<int>(handle.layout); })
      .def_readonly("expert_alignment", &DispatchHandle::expert_alignment)
      .def_property_readonly("is_open", &DispatchHandle::is_open);

  py::class_<Core, ClientCore> core(m, "ExpertParallel");
  core.def(py::init([](const CommunicatorCore& communicator, bool owns_comm, int num_experts, int num_topk, int hidden,
                       int num_max_tokens_per_rank, int num_buffers, const py::object& dtype,
                       std::optional<int> num_max_ll_tokens, const at::Device& device) {
        const auto comm = communicator.communicator();
        const Member& member = comm->member();
        const MoeConfig config =
            make_config(member.rank, member.num_ranks, num_experts, num_topk, hidden, num_max_tokens_per_rank,
                        num_buffers, dtype, num_max_ll_tokens, member.target);
        return std::make_unique<Core>(make_unlocked<ExpertParallel>(comm, config), comm, owns_comm, scalar_type(dtype),
                                      device);
      }))
      .def("traced_experts", [](const Core& core) { return TracedExperts{core.ep()}; })
      .def_property_readonly("num_max_ll_tokens",
                             [](const Core& core) { return core.ep()->config().num_max_ll_tokens; });
  bind_calls(core);
  bind_views(core);
}

}  // namespace moe_a2a::bindings
