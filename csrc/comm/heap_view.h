// The symmetric heap as a kernel sees it: one base per rank, the same layout behind each.
#pragma once

#include <cstddef>

#include "arch/arch.h"

namespace moe_a2a {

// The most ranks that one node has; a RankSet is one 64-bit word (comm/rank_set.h).
inline constexpr int kMaxRanks = 64;

struct HeapView {
  int rank = 0;
  int num_ranks = 1;
  std::byte* base[kMaxRanks] = {};

  // The object at `local`, an address in this rank's heap, in the heap of `rank_of_peer`.
  template <class T>
  MOE_A2A_HOST_DEVICE T* peer(int rank_of_peer, T* local) const {
    const std::ptrdiff_t offset = reinterpret_cast<const std::byte*>(local) - base[rank];
    return reinterpret_cast<T*>(base[rank_of_peer] + offset);
  }
};

}  // namespace moe_a2a
