#include "bindings/views.h"

#include <algorithm>

namespace moe_a2a::bindings {

at::Tensor Views::view(const void* data, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type) const {
  return at::for_blob(const_cast<void*>(data), sizes)
      .strides(strides)
      .deleter([keep = ep_](void*) {})
      .target_device(device_)
      .options(at::TensorOptions().dtype(type).device(device_))
      .make_tensor();
}

at::Tensor Views::list(const void* data, int64_t size, at::ScalarType type) const {
  return view(data, {size}, {1}, type);
}

at::Tensor Views::rows(const DispatchHandle& handle, const MoeConfig& config, at::ScalarType type) const {
  const int64_t stride = config.max_row_stride() / size_of(config.row_dtype(handle.format));
  return view(ep_->region().row.at(handle.buffer), {config.row_capacity(), config.hidden}, {stride, 1}, type);
}
at::Tensor Views::scales(const DispatchHandle& handle, const MoeConfig& config) const {
  return view(ep_->region().row.at(handle.buffer, 0, 0, config.scales_offset()),
              {config.row_capacity(), config.num_scales()}, {config.max_row_stride() / 4, 1}, at::kFloat);
}

at::Tensor Views::recv_x(const DispatchHandle& handle, at::ScalarType type) {
  return rows(handle, ep_->config_of(handle), type);
}
at::Tensor Views::recv_x_scales(const DispatchHandle& handle) {
  if (handle.format == RowFormat::kPlain) {
    throw std::runtime_error("recv_x_scales exists for float8 rows; dispatch with x_scales= or quantize=\"fp8\"");
  }
  return scales(handle, ep_->config_of(handle));
}
at::Tensor Views::all_rows(const DispatchHandle& handle, at::ScalarType type) {
  return rows(handle, ep_->config(), type);
}
at::Tensor Views::all_scales(const DispatchHandle& handle) { return scales(handle, ep_->config()); }

int64_t Views::capacity(const DispatchHandle& handle) const { return ep_->num_positions(handle); }

at::Tensor Views::expert_offsets(const DispatchHandle& handle) {
  return list(ep_->region().expert_offsets.at(handle.buffer), ep_->config().num_local_experts + 1, at::kInt);
}
at::Tensor Views::expert_counts(const DispatchHandle& handle) {
  return list(ep_->region().expert_counts.at(handle.buffer), ep_->config().num_local_experts, at::kInt);
}
at::Tensor Views::landed_rows(const DispatchHandle& handle) {
  return list(ep_->region().landed_row.at(handle.buffer), ep_->config_of(handle).row_capacity(), at::kInt);
}
at::Tensor Views::landed_offsets(const DispatchHandle& handle) {
  return list(ep_->region().landed_offsets.at(handle.buffer), ep_->config().num_ranks + 1, at::kInt);
}
at::Tensor Views::term_positions(const DispatchHandle& handle) { return terms(handle, &RouteTerm::position, at::kInt); }
at::Tensor Views::term_weights(const DispatchHandle& handle) { return terms(handle, &RouteTerm::weight, at::kFloat); }

template <class T>
at::Tensor Views::terms(const DispatchHandle& handle, T RouteTerm::* member, at::ScalarType type) const {
  static_assert(sizeof(RouteTerm) == 2 * sizeof(T));
  const MoeConfig config = ep_->config_of(handle);
  const T* first = &(ep_->region().landed_term.at(handle.buffer)->*member);
  return view(first, {config.row_capacity(), config.num_topk}, {2 * config.num_topk, 2}, type);
}

at::Tensor Views::num_recv_tokens_per_rank(const DispatchHandle& handle) {
  return list(ep_->region().num_recv_tokens_per_rank.at(handle.buffer), ep_->config().num_ranks, at::kInt);
}
at::Tensor Views::expert_row_index(const DispatchHandle& handle) { return first_row_indices(handle, capacity(handle)); }
at::Tensor Views::first_row_indices(const DispatchHandle& handle, int64_t most) {
  return list(ep_->region().expert_row_index.at(handle.buffer), std::min(most, capacity(handle)), at::kInt);
}
at::Tensor Views::route_weights(const DispatchHandle& handle) {
  return list(ep_->region().route_weights.at(handle.buffer), capacity(handle), at::kFloat);
}
at::Tensor Views::route_src_rank(const DispatchHandle& handle) {
  return list(ep_->region().route_src_rank.at(handle.buffer), capacity(handle), at::kInt);
}
at::Tensor Views::route_src_token_idx(const DispatchHandle& handle) {
  return list(ep_->region().route_src_token_idx.at(handle.buffer), capacity(handle), at::kInt);
}

}  // namespace moe_a2a::bindings
