// Elements of routing tables and expert lists.
#pragma once

#include <cstdint>

#include "arch/arch.h"

namespace moe_a2a {

// One choice of one token in a routing table: the expert, and how many entries of that expert precede it in the chunk.
// The sender counts, so receivers can place entries independently and still keep every list in (source rank, token,
// choice) order.
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

// A summand of a landed row's sum: an expert's output and its weight. A list of fewer than K ends with position -1.
struct RouteTerm {
  int32_t position = -1;  // in the layout
  float weight = 0;
};

// f(term) for a landed row's terms, in k order.
template <class F>
MOE_A2A_HOST_DEVICE void for_each_term(const RouteTerm* terms, int num_topk, const F& f) {
  MOE_A2A_ROLLED
  for (int k = 0; k < num_topk && terms[k].position >= 0; ++k) f(terms[k]);
}

}  // namespace moe_a2a
