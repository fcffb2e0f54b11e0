// Why a rank refuses a call, as written to every peer; see RefusalText in report.h.
#pragma once

#include <string>

#include "comm/context.h"

namespace moe_a2a {

// `why`, truncated at a UTF-8 character boundary if it is too long.
RefusalText to_refusal_text(const std::string& why);

}  // namespace moe_a2a

namespace moe_a2a::inline MOE_A2A_TARGET {

// Writes a text to every rank. Visible before any signal raised after it.
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
