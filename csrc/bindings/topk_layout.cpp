#include "bindings/topk_layout.h"

#include <string>
#include <tuple>

#include "bindings/clients.h"
#include "bindings/signals.h"
#include "bindings/tensor_gate.h"
#include "moe/route/run_topk_layout.h"

namespace moe_a2a::bindings {
namespace {

// topk_idx [num_tokens, num_topk] int32 or int64, checked by the caller but for its memory. Returns
// (num_tokens_per_rank int32 [num_ranks], num_tokens_per_expert int32 [num_experts], is_token_in_rank bool
// [num_tokens, num_ranks]).
std::tuple<at::Tensor, at::Tensor, at::Tensor> topk_layout(const at::Tensor& topk_idx, int num_experts, int num_ranks,
                                                           int rank, const std::string& target) {
  const Place here = {.rank = rank, .device = topk_idx.device(), .owner = "topk_idx"};
  check_plain(here, topk_idx, "topk_idx");
  const at::Tensor ids = topk_idx.contiguous();
  const at::Tensor counts = make_tensor(here, {num_ranks + num_experts}, at::kInt);
  const at::Tensor in_rank = make_tensor(here, {ids.size(0), num_ranks}, at::kBool);
  const TopkLayoutArgs args = {.topk_idx = {ids.const_data_ptr(), ids.scalar_type() == at::kLong},
                               .num_tokens = static_cast<int>(ids.size(0)),
                               .num_topk = static_cast<int>(ids.size(1)),
                               .num_experts = num_experts,
                               .num_ranks = num_ranks,
                               .counts = counts.mutable_data_ptr<int32_t>(),
                               .is_token_in_rank = in_rank.mutable_data_ptr<bool>()};
  void* const stream = current_stream(here.device);
  py::gil_scoped_release unlocked;
  run_topk_layout(target, here.device.is_cpu() ? 0 : here.device.index(), args, stream);
  raise_signal_error();
  return {counts.narrow(0, 0, num_ranks), counts.narrow(0, num_ranks, num_experts), in_rank};
}

}  // namespace

void bind_topk_layout(py::module_& m) {
  m.def("topk_layout", &topk_layout, py::arg("topk_idx"), py::arg("num_experts"), py::arg("num_ranks"), py::arg("rank"),
        py::arg("target"));
}

}  // namespace moe_a2a::bindings
