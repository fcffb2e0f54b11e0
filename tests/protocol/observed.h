// What the explored code reports to the explorer. Plain accesses outside a running schedule are ignored.
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

// Plain accesses: checked for races, not schedule points.
void observed_read(const void* address, size_t bytes);
void observed_write(const void* address, size_t bytes);

void observed_pause();
uint64_t observed_clock();

}  // namespace moe_a2a
