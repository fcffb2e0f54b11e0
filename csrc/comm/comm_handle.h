// What ranks tell each other when they meet, and what they must agree on.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "arch/memory_handle.h"
#include "moe/moe_config.h"

namespace moe_a2a {

// What a rank sends the others before anything is mapped: its memory, and what it believes all agree on.
struct CommHandle {
  MemoryHandle memory;
  uint64_t layout_digest = 0;  // of the sequence of fields in the heap
  int32_t rank = 0;
  int32_t num_ranks = 0;
  int32_t num_experts = 0;
  int32_t num_topk = 0;
  int32_t hidden = 0;
  int32_t num_max_tokens_per_rank = 0;
  int32_t num_buffers = 0;
  int32_t num_max_ll_tokens = 0;
  int32_t dtype = 0;
  char target[16] = {};
};

CommHandle make_comm_handle(const MoeConfig& config, const std::string& target, const MemoryHandle& memory,
                            uint64_t layout_digest);

// The first disagreement among `handles` (one per rank, in rank order), in words that name both ranks, the argument and
// the values; empty when they agree. Every rank sees the same handles, so all raise or none.
std::string disagreement(const std::vector<CommHandle>& handles);

}  // namespace moe_a2a
