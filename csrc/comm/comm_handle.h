// What ranks tell each other when they meet, and what they must agree on.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "arch/memory_handle.h"
#include "moe/moe_config.h"

namespace moe_a2a {

// What a rank sends the others before anything is mapped: its memory, and what it believes all agree on.
struct CommHandle {
  static constexpr uint64_t kMagic = 0x6132615f656f6dull;  // "moe_a2a"
  static constexpr int32_t kVersion = 2;

  uint64_t magic = kMagic;
  uint64_t checksum = 0;  // of all other bytes; see seal()
  MemoryHandle memory;
  uint64_t layout_digest = 0;  // of the sequence of fields in the heap
  int32_t version = kVersion;
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

  void seal() { checksum = sum(); }
  uint64_t sum() const;
};
static_assert(std::has_unique_object_representations_v<CommHandle>);

CommHandle make_comm_handle(const MoeConfig& config, const std::string& target, const MemoryHandle& memory,
                            uint64_t layout_digest);

// The first handle that is none, damaged, of another version or at a wrong place, or the first disagreement among
// `handles` (one per rank, in rank order), in words that name both ranks, the argument and the values; empty when they
// agree. Every rank sees the same handles, so all raise or none.
std::string disagreement(const std::vector<CommHandle>& handles);

// Why the handle at this rank's own place is not its own; empty when it is. With disagreement(), that no handle is of
// an object with another configuration.
std::string not_own(const std::vector<CommHandle>& handles, const CommHandle& own);

}  // namespace moe_a2a
