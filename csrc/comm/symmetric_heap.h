// One allocation per rank, mapped by all. Set-up has two steps, so that any channel can carry the handles: every rank
// allocates and sends its MemoryHandle to the others, then every rank connects.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

#include "arch/device.h"
#include "arch/interrupt.h"
#include "comm/heap_view.h"

namespace moe_a2a {

// Maps every other rank's heap; `handles` are in rank order. If one heap cannot be mapped, none stays mapped, and a
// second attempt may succeed.
inline HeapView connect_heap(Device& device, std::byte* own, int rank, const std::vector<MemoryHandle>& handles,
                             double timeout_seconds) {
  HeapView view;
  view.rank = rank;
  view.num_ranks = static_cast<int>(handles.size());
  const auto for_peers = [&](int end, auto call) {
    for (int r = 0; r < end; ++r) {
      if (r != rank) call(r);
    }
  };
  int num_open = 0;
  const std::string who = "rank " + std::to_string(rank) + " cannot map the memory of rank ";
  try {
    for_peers(view.num_ranks, [&](int r) {
      num_open = r;
      view.base[r] = device.open_peer(handles[r], timeout_seconds);
    });
  } catch (const std::exception& error) {
    for_peers(num_open, [&](int r) { device.close_peer(view.base[r]); });
    const std::string what = who + std::to_string(num_open) + ": " + error.what();
    if (dynamic_cast<const std::invalid_argument*>(&error) != nullptr) throw std::invalid_argument(what);
    if (dynamic_cast<const Interrupted*>(&error) != nullptr) throw Interrupted(what);
    throw std::runtime_error(what);
  }
  view.base[rank] = own;
  for_peers(view.num_ranks, [&](int r) { device.confirm_peer(view.base[r], rank); });
  return view;
}

}  // namespace moe_a2a
