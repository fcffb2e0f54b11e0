// One choice of one token, as the sender writes it into the routing table and as the receiver places it.
#pragma once

#include <cstdint>

#include "arch/arch.h"

namespace moe_a2a {

// The expert, and how many choices of the same expert stand before this one in the chunk. The sender counts, so that
// the receiver places every choice on its own: in a list the order of (source rank, token, choice) is kept.
struct RouteEntry {
  static constexpr uint32_t kDropped = 0xffff;

  uint32_t word = kDropped << 16;

  MOE_A2A_HOST_DEVICE static RouteEntry pack(uint32_t expert, uint32_t idx_in_chunk) {
    return {expert << 16 | idx_in_chunk};
  }
  MOE_A2A_HOST_DEVICE static RouteEntry dropped() { return {kDropped << 16}; }
  MOE_A2A_HOST_DEVICE bool is_dropped() const { return word >> 16 == kDropped; }
  MOE_A2A_HOST_DEVICE int expert() const { return static_cast<int>(word >> 16); }
  MOE_A2A_HOST_DEVICE int idx_in_chunk() const { return static_cast<int>(word & 0xffff); }
};

// One of the expert outputs that a landed row's sum is made of. A list of fewer than K ends with position -1.
struct RouteTerm {
  int32_t position = -1;  // in the layout
  float weight = 0;
};

}  // namespace moe_a2a
