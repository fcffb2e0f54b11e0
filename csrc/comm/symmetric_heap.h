// One allocation per rank, mapped by all of them. Two steps, so that any channel can carry the handles between: every
// rank allocates and sends its MemoryHandle to the others, then every rank connects.
#pragma once

#include <cstddef>
#include <vector>

#include "arch/memory_handle.h"
#include "comm/heap_view.h"

namespace moe_a2a {

// Maps every other rank's heap; `handles` are those of all ranks in rank order. `Machine` is the host side of a target,
// or the Backend that wraps one.
template <class Machine>
HeapView connect_heap(Machine& machine, std::byte* own, int rank, const std::vector<MemoryHandle>& handles) {
  HeapView view;
  view.rank = rank;
  view.num_ranks = static_cast<int>(handles.size());
  for (int r = 0; r < view.num_ranks; ++r) {
    view.base[r] = r == rank ? own : machine.open_peer(handles[r], view.num_ranks);
  }
  return view;
}

}  // namespace moe_a2a
