#include "bindings/recv_topk.h"

#include "bindings/tensor_gate.h"

namespace moe_a2a::bindings {
namespace {

RecvTopkArgs args_of(const TopkIds& wanted, const at::Tensor& ids, const at::Tensor& weights) {
  return {.wide_ids = wanted.type == at::kLong,
          .num_rows = ids.size(0),
          .first_expert = wanted.first_expert,
          .no_expert = wanted.no_expert.value_or(wanted.first_expert),
          .others_in_turn = !wanted.no_expert,
          .ids = ids.mutable_data_ptr(),
          .weights = weights.mutable_data_ptr<float>()};
}

}  // namespace

std::pair<at::Tensor, at::Tensor> run_recv_topk(ExpertParallel& ep, const DispatchHandle& handle, at::Device device,
                                                const TopkIds& wanted, const LaunchPlace& place) {
  const MoeConfig config = ep.config_of(handle);
  const int64_t shape[] = {config.row_capacity(), config.num_topk};
  const at::Tensor ids = make_tensor({config.rank, device}, shape, wanted.type);
  const at::Tensor weights = make_tensor({config.rank, device}, shape, at::kFloat);
  const RecvTopkArgs args = args_of(wanted, ids, weights);
  py::gil_scoped_release unlocked;
  ep.recv_topk(handle, args, place);
  return {ids, weights};
}

PackedTopk run_packed_topk(ExpertParallel& ep, const DispatchHandle& handle, at::Device device, int64_t num_rows,
                           const TopkIds& wanted, const LaunchPlace& place) {
  const MoeConfig config = ep.config_of(handle);
  const Place here = {config.rank, device};
  const at::Tensor row_index = make_tensor(here, {num_rows}, at::kLong);
  const at::Tensor ids = make_tensor(here, {num_rows, config.num_topk}, wanted.type);
  const at::Tensor weights = make_tensor(here, {num_rows, config.num_topk}, at::kFloat);
  const at::Tensor sum_index = make_tensor(here, {config.row_capacity()}, at::kInt);
  const at::Tensor numbers = make_tensor(here, {config.num_ranks + config.num_local_experts}, at::kInt);
  RecvTopkArgs args = args_of(wanted, ids, weights);
  args.packed = true;
  args.row_index = row_index.mutable_data_ptr<int64_t>();
  args.sum_index = sum_index.mutable_data_ptr<int32_t>();
  args.numbers = numbers.mutable_data_ptr<int32_t>();
  py::gil_scoped_release unlocked;
  ep.recv_topk(handle, args, place);
  return {row_index, ids, weights, sum_index, numbers};
}

}  // namespace moe_a2a::bindings
