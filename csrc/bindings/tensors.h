// Checks the tensors of MoE calls and converts them to addresses and strides. Uses only device-generic libtorch calls,
// so a binding built with a CPU torch serves any device.
#pragma once

#include <optional>

#include "bindings/tensor_gate.h"
#include "moe/expert_parallel.h"

namespace moe_a2a::bindings {

// Raises TypeError, naming `whose`, for a dtype that rows cannot have.
DType to_dtype(at::ScalarType type, const char* whose, int rank = kNoRank);

// References, valid for one call.
struct DispatchTensors {
  const at::Tensor& x;
  const at::Tensor& topk_idx;
  const std::optional<at::Tensor>& topk_weights;
  const std::optional<at::Tensor>& x_scales;
  bool quantize = false;
  bool mx_scales = false;               // four bytes, a scale each, in place of each float32
  int64_t num_max_tokens_per_rank = 0;  // of this dispatch, the same on all ranks; 0: the object's
};

// Raise ValueError or TypeError that names the value, the limit, the rank and the argument to change.
void check_dispatch(const MoeConfig& config, at::Device device, const DispatchTensors& tensors);
DispatchInput checked_input(const ExpertParallel& ep, at::Device device, const DispatchTensors& tensors);
// is_packed: the sums of a presummed y have the places that the caller's sum_index says.
Rows checked_y(const ExpertParallel& ep, at::Device device, const DispatchHandle& handle, const at::Tensor& y,
               bool presummed, bool is_packed = false);
// `out`, or a new tensor. `y`: the caller's tensor that the same launch reads; null: none.
at::Tensor checked_out(const ExpertParallel& ep, at::Device device, int num_tokens, at::ScalarType type,
                       const std::optional<at::Tensor>& out, const at::Tensor* y = nullptr);

// Factors of the local experts, [E_local] or [E_local, hidden] of the rows' type; without: `factor` for all.
ExpertScales checked_scales(const MoeConfig& config, at::Device device, const std::optional<at::Tensor>& scales,
                            double factor);

// Rows to push (see moe/link_floor.h): x [num_rows, n] with contiguous rows, pushes int64 [num_rows, 2]: ranks and
// token.
struct PushedRows {
  Rows x;
  int num_rows = 0;
  int64_t row_bytes = 0;
  const Push* pushes = nullptr;
};
PushedRows checked_push(const MoeConfig& config, at::Device device, const at::Tensor& x, const at::Tensor& pushes);

}  // namespace moe_a2a::bindings
