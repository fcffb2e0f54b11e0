// The fourth target: the interface of arch/cpu.h, with every atomic, pause and copy reported to the explorer, so that
// the real kernels and protocol run under its schedules. Selected with MOE_A2A_TARGET_HEADER.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "arch/attributes.h"
#include "arch/matches.h"
#include "arch/number.h"
#include "arch/order.h"
#include "observed.h"

#define MOE_A2A_TARGET explored

namespace moe_a2a::inline explored {

inline constexpr int kWarpSize = 1;
inline constexpr int kBlockThreads = 1;
inline constexpr bool kBlocksAreUnequal =
    true;  // as on a GPU, see comm/work_queue.h: blocks here are as unequal as can be
inline constexpr bool kRanksShareCores = false;  // as on a GPU: more orders of a block's steps
inline constexpr uint32_t kPollsPerLook = 4;     // a poll without news costs time and changes nothing
template <class T>
inline constexpr int kLaneElements = 4;
inline constexpr int kLaneUnroll = 1;
inline constexpr int kRowsInFlight = 1;
inline constexpr int kQuantizeUnroll = 1;
template <class T>
inline constexpr int kQuantizeElements = 128;
inline constexpr bool kAlignedVectors = false;
inline constexpr float kFloat8Max = 448.0f;

// ---- groups: one member, as on the CPU

struct Thread {
  int rank() const { return 0; }
  int size() const { return 1; }
  void sync() const {}
  void release_sync() const {}
  template <class T>
  T broadcast(T value, int /*lane*/ = 0) const {
    return value;
  }
  bool any(bool value) const { return value; }
  template <class T>
  T last(T value) const {
    return value;
  }
  uint64_t reduce_or(uint64_t bits) const { return bits; }
  Matches matches(int32_t, int) const { return {0, 1}; }
  Matches matches(bool) const { return {0, 1}; }
  template <int kLanes, class T>
  T max_of_neighbours(T value) const {
    return value;
  }
  template <int kLanes, int kCount>
  float largest_magnitude(const float (&)[kCount], float) const {
    std::abort();
  }
  template <class T>
  T inclusive_sum(T value) const {
    return value;
  }
};

using Warp = Thread;

struct Block : Thread {
  bool is_closing_warp() const { return true; }
  Warp warp() const { return {}; }
  int warp_rank() const { return 0; }
  int num_warps() const { return 1; }
};

struct Grid {
  int block_rank, num_blocks;
  int rank() const { return block_rank; }
  int size() const { return num_blocks; }
};

// ---- memory

inline int count_trailing_zeros(uint64_t word) { return __builtin_ctzll(word); }

// A single one: the explored kernels are compiled without the recorder and keep nothing there.
template <class T>
T& warp_memory() {
  static T of_warp;
  return of_warp;
}

// Block-scope operations do not concern the explorer: a block is one thread.
template <Order kOrder, Scope kScope, class T>
T atomic_load(const T* address) {
  if constexpr (kScope == Scope::kBlock) return *address;
  return static_cast<T>(observed_load(address, sizeof(T), kOrder));
}

template <Order kOrder, Scope kScope, class T>
void atomic_store(T* address, T value) {
  if constexpr (kScope == Scope::kBlock) {
    *address = value;
  } else {
    observed_store(address, sizeof(T), static_cast<uint64_t>(value), kOrder);
  }
}

template <Order kOrder, Scope kScope, class T>
T atomic_add(T* address, T value) {
  if constexpr (kScope == Scope::kBlock) {
    const T before = *address;
    *address = before + value;
    return before;
  } else {
    return static_cast<T>(observed_add(address, sizeof(T), static_cast<uint64_t>(value), kOrder));
  }
}

template <Order kOrder, Scope kScope, class T>
bool atomic_claim(T* address, T expected, T desired) {
  return observed_claim(address, sizeof(T), expected, desired, kOrder);
}

// Both ways to order a signal are explored: release stores as on the CPU, or one fence and relaxed stores as on the
// GPUs. The explorer decides which one a release store stands for, see Mutation::signals_by_fence.
template <Scope = Scope::kSystem>
void fence_before_signals() {
  observed_fence();
}
inline constexpr Order kSignalOrder = Order::kRelease;
inline constexpr bool kLaunchesRelease = false;
inline constexpr bool kOneWarpPublishes = false;
inline constexpr Order kPollOrder = Order::kRelaxed;  // as on AMD: poll, then a separate acquire
using LlBits = uint64_t;

inline void prefetch(const void*) {}

template <class Group, class Members, class Target>
void multicast_bytes(const Group&, const Members& members, int turn, Target target, const void* source, size_t bytes,
                     bool /*in_shared*/ = false) {
  observed_read(source, bytes);
  members.visit_from(turn, [&](int rank) {
    observed_write(target(rank), bytes);
    std::memcpy(target(rank), source, bytes);
  });
}

template <class T>
struct LaneVector {
  T element[kLaneElements<T>];
};

template <class T>
using LoadedLane = LaneVector<T>;

template <class T>
void load_lane(LaneVector<T>& vector, const T* source) {
  observed_read(source, sizeof(vector));
  std::memcpy(&vector, source, sizeof(vector));
}

template <class T>
void store_lane(T* target, const LaneVector<T>& vector) {
  observed_write(target, sizeof(vector));
  std::memcpy(target, &vector, sizeof(vector));
}

template <int kCount, class T>
void load_values(T (&values)[kCount], const T* source, bool /*in_shared*/ = false) {
  observed_read(source, sizeof(values));
  std::memcpy(values, source, sizeof(values));
}

template <int kCount, class T>
void store_values(T* target, const T (&values)[kCount]) {
  observed_write(target, sizeof(values));
  std::memcpy(target, values, sizeof(values));
}

// ---- numbers: explored rows are fp32; the protocol does not look inside

inline float to_float(float value) { return value; }
inline float to_float(Bfloat16 value) { return std::bit_cast<float>(uint32_t{value.bits} << 16); }  // scales
template <class T>
float to_float(T) {
  std::abort();
}

// The i-th element of a lane's piece.
template <class T>
float value_of(const LoadedLane<T>& lane, int i) {
  return to_float(lane.element[i]);
}
template <class T>
T from_float(float) {
  std::abort();
}
template <>
inline float from_float<float>(float value) {
  return value;
}
template <int kCount>
void to_float8(const float (&)[kCount], float, Float8 (&)[kCount]) {
  std::abort();
}
inline float larger(float a, float b) { return a > b ? a : b; }

// ---- time

inline uint64_t clock_now() { return observed_clock(); }
inline void pause(uint32_t /*polls*/ = 0) { observed_pause(); }
inline bool is_interrupted() { return false; }

}  // namespace moe_a2a::inline explored

#include "arch/row_sender.h"
#include "arch/streamed_sums.h"
