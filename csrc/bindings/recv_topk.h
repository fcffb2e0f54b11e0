// The local experts and weights of landed rows, as new tensors.
#pragma once

#include <optional>
#include <tuple>
#include <utility>

#include "bindings/python.h"
#include "moe/expert_parallel.h"

namespace moe_a2a::bindings {

struct TopkIds {
  at::ScalarType type;               // int32 or int64
  int64_t first_expert;              // of the first local expert
  std::optional<int64_t> no_expert;  // none: see RecvTopkArgs::others_in_turn
};

// (ids, weights), [num_ranks * num_max_tokens_per_rank, num_topk]: of each row of recv_x, without gaps.
std::pair<at::Tensor, at::Tensor> run_recv_topk(ExpertParallel& ep, const DispatchHandle& handle, at::Device device,
                                                const TopkIds& wanted, const LaunchPlace& place);

// Of packed rows, see RecvTopkArgs: (row_index int64 [num_rows], ids and fp32 weights [num_rows, num_topk],
// sum_index int32 [num_ranks * num_max_tokens_per_rank], numbers int32 [num_ranks + num_local_experts]).
using PackedTopk = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
PackedTopk run_packed_topk(ExpertParallel& ep, const DispatchHandle& handle, at::Device device, int64_t num_rows,
                           const TopkIds& wanted, const LaunchPlace& place);

}  // namespace moe_a2a::bindings
