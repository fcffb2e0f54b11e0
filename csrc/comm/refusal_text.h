// Why a rank refuses its part of a call, as it is left with every peer; see RefusalText in report.h.
#pragma once

#include <string>

#include "comm/context.h"

namespace moe_a2a {

// `why`, cut at the end of a UTF-8 character where it is too long.
RefusalText to_refusal_text(const std::string& why);

}  // namespace moe_a2a

namespace moe_a2a::inline MOE_A2A_TARGET {

// Leaves a text with every rank. Visible before the signal that follows it.
MOE_A2A_DEVICE void leave_text(const ClientContext& c, int slot, const Block& block, const RefusalText& text) {
  uint64_t* local = c.services.refusal_text.at(slot, c.heap.rank);
  for (int r = 0; r < c.heap.num_ranks; ++r) {
    for (int i = block.rank(); i < kRefusalWords; i += block.size()) {
      atomic_store<Order::kRelaxed, Scope::kSystem>(c.heap.peer(r, local + i), text.word[i]);
    }
  }
  block.release_sync();
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
