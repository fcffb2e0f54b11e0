// What the explored code reports to the explorer.
#pragma once

#include <cstddef>
#include <cstdint>

#include "arch/order.h"

namespace moe_a2a {

// Each of these four is a schedule point: another thread may run next.
uint64_t observed_load(const void* address, size_t bytes, Order order);
void observed_store(void* address, size_t bytes, uint64_t value, Order order);
uint64_t observed_add(void* address, size_t bytes, uint64_t value, Order order);
bool observed_claim(void* address, size_t bytes, uint64_t expected, uint64_t desired, Order order);

// A release fence before signals; effective only in schedules that model the GPUs (Mutation::signals_by_fence).
void observed_fence();

// The memory that the ranks of the running schedule share. All other memory is private to its thread.
struct WatchedMemory {
  const std::byte* begin = nullptr;
  size_t nbytes = 0;  // 0 outside a schedule

  bool holds(const void* address) const {
    return static_cast<size_t>(static_cast<const std::byte*>(address) - begin) < nbytes;
  }
};
inline WatchedMemory watched_memory;

void watched_read(const void* address, size_t bytes);
void watched_write(const void* address, size_t bytes);

// Plain accesses: checked for races, not schedule points. Inline: most of them are private.
inline void observed_read(const void* address, size_t bytes) {
  if (watched_memory.holds(address)) watched_read(address, bytes);
}
inline void observed_write(const void* address, size_t bytes) {
  if (watched_memory.holds(address)) watched_write(address, bytes);
}

void observed_pause();
uint64_t observed_clock();

}  // namespace moe_a2a
