// The CPU target: a warp has one lane, a block is one OS thread, a device is this process's memory. It is the reference
// for what kernels compute, and what sanitizers and laptops run.
#pragma once

#include <sched.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ctime>

#include "arch/attributes.h"
#include "arch/cpu_machine.h"
#include "arch/matches.h"
#include "arch/number.h"
#include "arch/order.h"

#if !defined(MOE_A2A_CPU_LEVEL)
#define MOE_A2A_TARGET MOE_A2A_VARIANT_OF(cpu)
#elif MOE_A2A_CPU_LEVEL == 2  // see arch/cpu_level.h
#define MOE_A2A_TARGET MOE_A2A_VARIANT_OF(cpu_v2)
#elif MOE_A2A_CPU_LEVEL == 3
#define MOE_A2A_TARGET MOE_A2A_VARIANT_OF(cpu_v3)
#else
#define MOE_A2A_TARGET MOE_A2A_VARIANT_OF(cpu_v4)
#endif

// clang-format off: these use MOE_A2A_TARGET
#include "arch/processor.h"
#include "arch/soft_numbers.h"
// clang-format on

namespace moe_a2a::inline MOE_A2A_TARGET {

inline constexpr int kWarpSize = 1;
inline constexpr int kBlockThreads = 1;
inline constexpr bool kBlocksAreUnequal = false;  // see comm/work_queue.h
inline constexpr bool kRanksShareCores = true;    // waiting means switching to another thread
inline constexpr uint32_t kPollsPerLook = 64;     // see comm/wait.h
// Elements that a lane works on at a time: enough for the compiler to vectorise.
template <class T>
inline constexpr int kLaneElements = 256;
// Pieces and rows that a lane adds up side by side, and how a quantiser's values are grouped.
inline constexpr int kLaneUnroll = 1;
inline constexpr int kRowsInFlight = 1;
inline constexpr int kQuantizeUnroll = 1;
template <class T>
inline constexpr int kQuantizeElements = 128;
// Whether vector accesses need 16-byte alignment.
inline constexpr bool kAlignedVectors = false;

// ---- groups: with a single member, every exchange is the identity

struct Thread {
  int rank() const { return 0; }
  int size() const { return 1; }
  void sync() const {}
  // Orders the stores of all members before any member's next signal.
  void release_sync() const {}
  template <class T>
  T broadcast(T value, int /*lane*/ = 0) const {
    return value;
  }
  bool any(bool value) const { return value; }
  int count(bool value) const { return value ? 1 : 0; }  // members with `value`
  // The last member's value; broadcast() gives the first's.
  template <class T>
  T last(T value) const {
    return value;
  }
  // All bits that any member has set.
  uint64_t reduce_or(uint64_t bits) const { return bits; }
  Matches matches(int32_t, int) const { return {0, 1}; }
  Matches matches(bool) const { return {0, 1}; }
  template <class T>
  T inclusive_sum(T value) const {
    return value;
  }
  // The largest value among kLanes neighbours.
  template <int kLanes, class T>
  T max_of_neighbours(T value) const {
    static_assert(kLanes == 1);
    return value;
  }
  // The largest magnitude among the values of kLanes neighbours, `least` if that is larger; ignores NaNs. As integers:
  // the compiler may not reorder comparisons of floats, and so would not vectorise them.
  template <int kLanes, int kCount>
  float largest_magnitude(const float (&values)[kCount], float least) const {
    static_assert(kLanes == 1);
    auto largest = std::bit_cast<int32_t>(least);
    for (float value : values) {
      const int32_t bits = std::bit_cast<int32_t>(value) & 0x7fffffff, number = bits > 0x7f800000 ? 0 : bits;
      largest = number > largest ? number : largest;
    }
    return std::bit_cast<float>(largest);
  }
};

using Warp = Thread;

struct Block : Thread {
  struct Scratch {};
  explicit Block(Scratch&) {}
  // True in one thread of the block, once all its warps have arrived.
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

// A T per warp, for the duration of a launch.
template <class T>
T& warp_memory() {
  static thread_local T of_warp;
  return of_warp;
}

// On GPUs a release store costs a fence, so one fence precedes several relaxed signals. Here a fence is free, and each
// signal is a release store: thread sanitizer understands those, but not a free-standing fence.
template <Scope = Scope::kSystem>
void fence_before_signals() {}
inline constexpr Order kSignalOrder = Order::kRelease;
inline constexpr bool kLaunchesRelease = false;       // see comm/signal.h
inline constexpr bool kOneWarpPublishes = false;      // see comm/signal_queue.h
inline constexpr Order kPollOrder = Order::kAcquire;  // see comm/wait.h
using LlBits = uint64_t;                              // see comm/ll_word.h

inline void prefetch(const void* address) { __builtin_prefetch(address); }

// Copies `bytes` from `source` to `target(i)` for each i of `members` (see RankSet), starting with `turn`. `in_shared`:
// the source is in the block's shared memory, which is ordinary memory here.
template <class Group, class Members, class Target>
void multicast_bytes(const Group&, const Members& members, int turn, Target target, const void* source, size_t bytes,
                     bool /*in_shared*/ = false) {
  members.visit_from(turn, [&](int rank) { std::memcpy(target(rank), source, bytes); });
}

template <class T>
struct LaneVector {
  T element[kLaneElements<T>];
};

// A lane's piece, loaded. It is read in place: a kilobyte does not fit in a register.
template <class T>
struct LoadedLane {
  const T* element;
};

template <class T>
void load_lane(LoadedLane<T>& lane, const T* source) {
  lane.element = source;
}

template <class T>
void store_lane(T* target, const LaneVector<T>& vector) {
  std::memcpy(target, &vector, sizeof(vector));
}

// Consecutive values between memory and a lane, kCount * sizeof(T) bytes.
template <int kCount, class T>
void load_values(T (&values)[kCount], const T* source, bool /*in_shared*/ = false) {
  std::memcpy(values, source, sizeof(values));
}
template <int kCount, class T>
void store_values(T* target, const T (&values)[kCount]) {
  std::memcpy(target, values, sizeof(values));
}

// The i-th element of a lane's piece.
template <class T>
float value_of(const LoadedLane<T>& lane, int i) {
  return to_float(lane.element[i]);
}

// ---- time

// Between two polls of a wait. Yields the core, since eight ranks may share two; a wait of more than a few milliseconds
// sleeps, so that a rank whose peers are late does not keep a core busy.
inline void pause(uint32_t polls = 0) {
  constexpr uint32_t kMaxYields = 4000;
  constexpr std::timespec kSleep{0, 50'000};
  if (polls < kMaxYields) {
    sched_yield();
  } else {
    nanosleep(&kSleep, nullptr);
  }
}

// Whether the host wants the waits of this launch to end.
inline bool is_interrupted() { return is_launch_interrupted(); }

// ---- host

using Machine = CpuMachine;

template <class Kernel>
void prepare(const LaunchSite&) {}

// Runs the kernel to completion: the CPU has no streams; the calling thread orders the work.
template <class Kernel>
void launch(const LaunchSite& site, const typename Kernel::Args& args) {
  const auto block_main = [](const void* job, int block_rank, int num_blocks, std::byte* shared) {
    Block::Scratch scratch;
    Kernel::run(*static_cast<const typename Kernel::Args*>(job), Grid{block_rank, num_blocks}, Block(scratch), shared);
  };
  site.block_pool->run(site.num_blocks, Kernel::shared_bytes(args), block_main, &args);
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET

#include "arch/cpu_block_tile.h"
#include "arch/row_sender.h"
#include "arch/streamed_sums.h"
