// The fifth target: a GPU's threads on the CPU. The groups of arch/simt.h run on fibers with 32 or 64 lanes per warp,
// so many-lane behaviour of the kernels runs without a GPU: with 32 as on NVIDIA (one warp publishes signals, 16-byte
// LL words, streamed sums), with 64 as on AMD. It replaces the CPU target (MOE_A2A_TARGET_HEADER).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "arch/attributes.h"
#include "arch/cpu_machine.h"
#include "arch/matches.h"
#include "arch/number.h"
#include "arch/order.h"
#include "lanes/fibers.h"

#define MOE_A2A_TARGET MOE_A2A_VARIANT_OF(cpu)
// A block is one OS thread, so block-shared is thread-local.
#define __shared__ static thread_local
#define __device__
#define __forceinline__ inline

#include "arch/processor.h"
#include "arch/soft_numbers.h"

namespace moe_a2a::lanes {

struct SharedMemory {
  const void *begin = nullptr, *end = nullptr;

  static SharedMemory& of_block() {
    static thread_local SharedMemory memory;
    return memory;
  }
  bool holds(const void* address) const { return address >= begin && address < end; }
};

[[noreturn]] inline void stop(const char* why) {
  std::fprintf(stderr, "lanes: %s\n", why);
  std::abort();
}

}  // namespace moe_a2a::lanes

namespace moe_a2a::inline MOE_A2A_TARGET {

inline constexpr int kWarpSize = MOE_A2A_LANES;
// 512 as on a GPU; with 32 lanes fewer, since some code depends on the number of threads.
inline constexpr int kBlockThreads = kWarpSize == 64 ? 512 : 128;
inline constexpr bool kAsNvidia = kWarpSize == 32;

// ---- threads

inline int thread_in_block() { return lanes::Fibers::of_block().current(); }
inline int lane_in_warp() { return thread_in_block() % kWarpSize; }
inline void warp_sync() { lanes::Fibers::of_block().meet_warp(); }
inline void block_sync() { lanes::Fibers::of_block().meet_block(); }
inline void drain_stores() {}

// The values of all lanes of the warp, in lane order; valid until the next exchange but one.
template <class T>
const T* exchange(T value) {
  constexpr int kWarps = kBlockThreads / kWarpSize;
  static thread_local T brought[2][kWarps][kWarpSize];
  static thread_local int turn[kBlockThreads];
  const int warp = thread_in_block() / kWarpSize;
  T(&mine)[kWarpSize] = brought[turn[thread_in_block()] ^= 1][warp];
  mine[lane_in_warp()] = value;
  warp_sync();
  return mine;
}

inline bool warp_any(bool value) {
  const bool* all = exchange(value);
  for (int i = 0; i < kWarpSize; ++i) {
    if (all[i]) return true;
  }
  return false;
}
inline uint64_t warp_or(uint64_t bits) {
  const uint64_t* all = exchange(bits);
  for (int i = 0; i < kWarpSize; ++i) bits |= all[i];
  return bits;
}
inline int32_t warp_inclusive_sum(int32_t value) {
  const int32_t* all = exchange(value);
  int32_t sum = 0;
  for (int i = 0; i <= lane_in_warp(); ++i) sum += all[i];
  return sum;
}
using LaneMask = std::conditional_t<kAsNvidia, uint32_t, uint64_t>;
inline LaneMask warp_ballot(bool value) {
  const bool* all = exchange(value);
  LaneMask votes = 0;
  for (int i = 0; i < kWarpSize; ++i) votes |= LaneMask{all[i]} << i;
  return votes;
}
inline int count_ones(LaneMask word) { return __builtin_popcountll(word); }
template <int kBits>
LaneMask equal_lanes(int32_t value) {
  const int32_t* all = exchange(value);
  LaneMask equal = 0;
  for (int i = 0; i < kWarpSize; ++i) equal |= LaneMask{(all[i] ^ value) % (1 << kBits) == 0} << i;
  return equal;
}
template <class T>
T shuffle(T value, int lane) {
  return exchange(value)[lane];
}
template <class T>
T shuffle_across(T value, int distance) {
  return exchange(value)[lane_in_warp() ^ distance];
}

inline bool block_any(bool value) {
  static thread_local bool brought[kBlockThreads];
  brought[thread_in_block()] = value;
  block_sync();
  bool any = false;
  for (const bool one : brought) any |= one;
  block_sync();
  return any;
}

// ---- memory

template <Scope = Scope::kSystem>
void fence_before_signals() {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
inline constexpr Order kSignalOrder = Order::kRelaxed;
inline constexpr bool kLaunchesRelease = kAsNvidia;
inline constexpr bool kOneWarpPublishes = kAsNvidia;
inline constexpr Order kPollOrder = kAsNvidia ? Order::kAcquire : Order::kRelaxed;

inline void prefetch(const void*) {}

struct alignas(16) Vec16 {
  uint32_t x, y, z, w;
};
// On AMD, shared memory needs its own instructions.
template <class T>
T load_global(const T* address) {
  if (!kAsNvidia && lanes::SharedMemory::of_block().holds(address)) lanes::stop("a global load from shared memory");
  return *address;
}
template <class T>
T load_shared(const T* address) {
  if (!lanes::SharedMemory::of_block().holds(address)) lanes::stop("a shared load from global memory");
  return *address;
}
template <class T>
void store_global(T* address, T value) {
  *address = value;
}

#if defined(__AVX__) && MOE_A2A_LANES == 32
// A single access on every processor with AVX.
using LlBits = Vec16;
inline Vec16 load_whole(const Vec16* address) {
  Vec16 value;
  asm volatile("vmovdqa %1, %%xmm0\n\tvmovdqu %%xmm0, %0" : "=m"(value) : "m"(*address) : "xmm0", "memory");
  return value;
}
inline void store_whole(Vec16* address, const Vec16& value) {
  asm volatile("vmovdqu %1, %%xmm0\n\tvmovdqa %%xmm0, %0" : "=m"(*address) : "m"(value) : "xmm0", "memory");
}
#else
using LlBits = uint64_t;
#endif

// ---- time

inline void pause(uint32_t /*polls*/ = 0) { lanes::Fibers::of_block().pause(); }
inline bool is_interrupted() { return is_launch_interrupted(); }

}  // namespace moe_a2a::inline MOE_A2A_TARGET

// clang-format off: each needs the ones before it
#include "arch/simt.h"
#include "arch/row_sender.h"
#include "lanes/streamed_sums.h"
#include "arch/block_tile.h"
// clang-format on

namespace moe_a2a::inline MOE_A2A_TARGET {

template <class T>
using WarpMatrix = PlainWarpMatrix<T>;

}  // namespace moe_a2a::inline MOE_A2A_TARGET

#include "arch/simt_block_tile.h"

namespace moe_a2a::lanes {

// Whether launches claim to be synchronous; if not, the host launches both halves of a call at once, as on a GPU.
inline bool are_launches_synchronous() {
  const char* launches = std::getenv("MOE_A2A_LAUNCHES_OF_A_CALL");
  return launches == nullptr || std::strcmp(launches, "one") != 0;
}

}  // namespace moe_a2a::lanes

namespace moe_a2a::inline MOE_A2A_TARGET {

class Machine final : public CpuMachine {
 public:
  explicit Machine(int device) : CpuMachine(device) { site_.max_shared_bytes = 64 << 10; }
  int warps_per_block() const override { return kBlockThreads / kWarpSize; }
  bool is_synchronous() const override { return lanes::are_launches_synchronous(); }
  bool needs_aligned_vectors() const override { return kAlignedVectors; }
};

template <class Kernel>
void prepare(const LaunchSite&) {}

template <class Kernel>
void launch(const LaunchSite& site, const typename Kernel::Args& args) {
  const auto block_main = [](const void* job, int block_rank, int num_blocks, std::byte* shared) {
    static thread_local typename Block::Scratch scratch;
    const auto& args = *static_cast<const typename Kernel::Args*>(job);
    lanes::SharedMemory::of_block() = {shared, shared + Kernel::shared_bytes(args)};
    lanes::Fibers::of_block().run(kBlockThreads, kWarpSize,
                                  [&] { Kernel::run(args, Grid{block_rank, num_blocks}, Block(scratch), shared); });
  };
  const size_t shared_bytes = Kernel::shared_bytes(args);
  if (static_cast<int64_t>(shared_bytes) > site.max_shared_bytes) {
    throw std::runtime_error(std::string(Kernel::kName) + " wants " + std::to_string(shared_bytes) +
                             " bytes of shared memory");
  }
  site.block_pool->run(site.num_blocks, shared_bytes, block_main, &args);
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
