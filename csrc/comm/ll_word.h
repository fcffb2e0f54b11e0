// LL words (NCCL's name): 8 or 16 bytes that carry their epoch beside their data and are written and read in one
// access. A reader that observes the epoch has the data: no signal, no fence, one trip over the link.
//
// The price is bytes: 16 for 12 where the target has 16-byte atomic accesses, otherwise 8 for 4. So small batches
// travel this way, large ones as rows and signals (signal.h).
#pragma once

#include <bit>
#include <cstdint>

#include "arch/arch.h"
#include "comm/signal.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

inline constexpr int kLlData = sizeof(LlBits) / sizeof(uint32_t) - 1;

struct alignas(LlBits) LlWord {
  uint32_t data[kLlData];
  uint32_t stamp;
};

// The low 31 bits of the epoch, and a bit that is clear in zeroed memory. A stale word can pass for a new one only
// after a multiple of 2^31 epochs.
MOE_A2A_HOST_DEVICE constexpr uint32_t ll_stamp(uint64_t epoch) { return 1u << 31 | static_cast<uint32_t>(epoch); }

// Whether the word carries `epoch`. If not, `seen` is set to the epoch that it carries, packed like a signal's word.
MOE_A2A_DEVICE bool has_epoch(const LlWord& word, uint64_t epoch, uint64_t& seen) {
  if (word.stamp == ll_stamp(epoch)) return true;
  seen = Signal::pack(word.stamp & ~(1u << 31), 0);
  return false;
}

MOE_A2A_HOST_DEVICE constexpr int num_ll_words(int num_dwords) { return (num_dwords + kLlData - 1) / kLlData; }

// For targets whose LlBits is a plain 64-bit word.
MOE_A2A_DEVICE uint64_t load_whole(const uint64_t* address) {
  return atomic_load<Order::kRelaxed, Scope::kSystem>(address);
}
MOE_A2A_DEVICE void store_whole(uint64_t* address, uint64_t bits) {
  atomic_store<Order::kRelaxed, Scope::kSystem>(address, bits);
}

MOE_A2A_DEVICE LlWord load_ll(const LlWord* address) {
  return std::bit_cast<LlWord>(load_whole(reinterpret_cast<const LlBits*>(address)));
}

MOE_A2A_DEVICE void store_ll(LlWord* address, const LlWord& word) {
  store_whole(reinterpret_cast<LlBits*>(address), std::bit_cast<LlBits>(word));
}

// The LL words of a token of `src`, from word `first` on.
template <class Field>
MOE_A2A_DEVICE LlWord* ll_words_at(const Field& field, int buffer, int src, int token, int first) {
  return reinterpret_cast<LlWord*>(field.at(buffer, src, token)) + first;
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
