// For every target that runs on the CPU: atomic accesses and a clock.
#pragma once

#include <time.h>

#include <cstdint>

#include "arch/order.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

inline int count_trailing_zeros(uint64_t word) { return __builtin_ctzll(word); }

constexpr int to_builtin(Order order) {
  return order == Order::kRelaxed   ? __ATOMIC_RELAXED
         : order == Order::kAcquire ? __ATOMIC_ACQUIRE
         : order == Order::kRelease ? __ATOMIC_RELEASE
                                    : __ATOMIC_ACQ_REL;
}

template <Order kOrder, Scope kScope, class T>
T atomic_load(const T* address) {
  return __atomic_load_n(address, to_builtin(kOrder));
}

template <Order kOrder, Scope kScope, class T>
void atomic_store(T* address, T value) {
  __atomic_store_n(address, value, to_builtin(kOrder));
}

template <Order kOrder, Scope kScope, class T>
T atomic_add(T* address, T value) {
  // Only for the threads of a block, one of which runs at a time; not atomic, so that the sanitizer reports a scope
  // that is too small as a race.
  if constexpr (kOrder == Order::kRelaxed && kScope == Scope::kBlock) return (*address += value) - value;
  return __atomic_fetch_add(address, value, to_builtin(kOrder));
}

template <Order kOrder, Scope kScope, class T>
bool atomic_claim(T* address, T expected, T desired) {
  return __atomic_compare_exchange_n(address, &expected, desired, false, to_builtin(kOrder), __ATOMIC_RELAXED);
}

inline constexpr uint64_t kClockTicksPerSecond = 1'000'000'000;

inline uint64_t clock_now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * kClockTicksPerSecond + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
