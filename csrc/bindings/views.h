// The views that a handle offers: tensors over the heap and the expert lists. Each view keeps the memory alive.
#pragma once

#include <memory>

#include "bindings/python.h"
#include "moe/expert_parallel.h"

namespace moe_a2a::bindings {

class Views {
 public:
  Views(std::shared_ptr<ExpertParallel> ep, at::Device device) : ep_(std::move(ep)), device_(device) {}

  // [num_ranks * num_max_tokens_per_rank, hidden], rows where they landed. num_max_tokens_per_rank: here and below, of
  // the handle's dispatch.
  at::Tensor recv_x(const DispatchHandle& handle, at::ScalarType type);
  // [num_ranks * num_max_tokens_per_rank, ceil(hidden / 128)] fp32, for float8 rows.
  at::Tensor recv_x_scales(const DispatchHandle& handle);
  // The same rows and those after them, as many as a dispatch without a bound of its own has. Positions of the masked
  // layout that hold no route may name a row of an earlier dispatch.
  at::Tensor all_rows(const DispatchHandle& handle, at::ScalarType type);
  at::Tensor all_scales(const DispatchHandle& handle);

  at::Tensor expert_offsets(const DispatchHandle& handle);            // int32 [num_local_experts + 1]
  at::Tensor expert_counts(const DispatchHandle& handle);             // int32 [num_local_experts]
  at::Tensor landed_rows(const DispatchHandle& handle);               // int32 [num_ranks * num_max_tokens_per_rank]
  at::Tensor landed_offsets(const DispatchHandle& handle);            // int32 [num_ranks + 1]
  at::Tensor num_recv_tokens_per_rank(const DispatchHandle& handle);  // int32 [num_ranks]

  // [num_ranks * num_max_tokens_per_rank, num_topk]: the terms of each landed row (RouteTerm), in two strided views.
  at::Tensor term_positions(const DispatchHandle& handle);  // int32
  at::Tensor term_weights(const DispatchHandle& handle);    // fp32

  // [positions of the layout]
  at::Tensor expert_row_index(const DispatchHandle& handle);
  at::Tensor first_row_indices(const DispatchHandle& handle, int64_t most);  // its first ones
  at::Tensor route_weights(const DispatchHandle& handle);
  at::Tensor route_src_rank(const DispatchHandle& handle);
  at::Tensor route_src_token_idx(const DispatchHandle& handle);

  // Positions of the handle's layout: the number of rows of expert_x and y.
  int64_t capacity(const DispatchHandle& handle) const;

 private:
  // The tensor keeps the memory alive, even after close().
  at::Tensor rows(const DispatchHandle& handle, const MoeConfig& config, at::ScalarType type) const;
  at::Tensor scales(const DispatchHandle& handle, const MoeConfig& config) const;
  at::Tensor view(const void* data, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type) const;
  at::Tensor list(const void* data, int64_t size, at::ScalarType type) const;
  template <class T>
  at::Tensor terms(const DispatchHandle& handle, T RouteTerm::* member, at::ScalarType type) const;

  std::shared_ptr<ExpertParallel> ep_;
  at::Device device_;
};

}  // namespace moe_a2a::bindings
