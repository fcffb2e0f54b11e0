#include "bindings/config.h"

#include <torch/csrc/Dtype.h>

#include "bindings/tensor_gate.h"
#include "bindings/tensors.h"

namespace moe_a2a::bindings {

at::ScalarType scalar_type(const py::object& dtype) {
  if (!THPDtype_Check(dtype.ptr()))
    throw py::type_error("expected a torch.dtype, got " + py::str(dtype).cast<std::string>());
  return reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
}

MoeConfig make_config(int rank, int num_ranks, int num_experts, int num_topk, int hidden, int num_max_tokens_per_rank,
                      int num_buffers, const py::object& dtype, std::optional<int> num_max_ll_tokens,
                      const std::string& target) {
  MoeConfig config{.rank = rank,
                   .num_ranks = num_ranks,
                   .num_experts = num_experts,
                   .num_topk = num_topk,
                   .hidden = hidden,
                   .num_max_tokens_per_rank = num_max_tokens_per_rank,
                   .num_buffers = num_buffers,
                   .dtype = to_dtype(scalar_type(dtype), "dtype=")};
  std::string violation = Communicator::violation(rank, num_ranks);
  if (violation.empty()) violation = config.violation();
  if (violation.empty()) {
    config.num_max_ll_tokens = num_max_ll_tokens ? *num_max_ll_tokens : default_ll_tokens(config, target);
    violation = config.violation();
  }
  if (!violation.empty()) throw py::value_error(violation + " (rank " + std::to_string(rank) + ")");
  return config;
}

void bind_config(py::module_& m) {
  m.def(
      "nbytes_for",
      [](int rank, int num_ranks, int num_experts, int num_topk, int hidden, int num_max_tokens_per_rank,
         int num_buffers, const py::object& dtype, std::optional<int> num_max_ll_tokens, const std::string& target) {
        return ExpertParallel::nbytes_for(make_config(rank, num_ranks, num_experts, num_topk, hidden,
                                                      num_max_tokens_per_rank, num_buffers, dtype, num_max_ll_tokens,
                                                      target));
      },
      "Bytes that one rank of such an ExpertParallel takes.");
  m.def(
      "check_dispatch",
      [](int rank, int num_experts, int num_topk, int hidden, int num_max_tokens_per_rank, const py::object& dtype,
         const at::Device& device, const at::Tensor& x, const at::Tensor& topk_idx,
         const std::optional<at::Tensor>& topk_weights, const std::optional<at::Tensor>& x_scales, bool quantize) {
        const MoeConfig config{.rank = rank,
                               .num_experts = num_experts,
                               .num_topk = num_topk,
                               .hidden = hidden,
                               .num_max_tokens_per_rank = num_max_tokens_per_rank,
                               .dtype = to_dtype(scalar_type(dtype), "dtype=")};
        check_dispatch(config, device, {x, topk_idx, topk_weights, x_scales, quantize});
      },
      "Raises what a dispatch of these tensors would.");
  m.def(
      "check_plain",
      [](int rank, const at::Device& device, const at::Tensor& tensor, const char* name) {
        check_plain({rank, device}, tensor, name);
      },
      "Raises for a tensor without memory of its own, or on another device.");
}

}  // namespace moe_a2a::bindings
