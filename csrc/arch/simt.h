// What the two GPU targets share: groups of threads, built on the few functions that cuda.h and hip.h define before
// they include this file (thread_in_block(), block_in_grid(), shuffle(), ...).
#pragma once

#include <cstring>
#include <type_traits>

#include "arch/attributes.h"
#include "arch/number.h"
#include "arch/order.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// ---- groups

struct Warp {
  __device__ int rank() const { return thread_in_block() % kWarpSize; }
  __device__ int size() const { return kWarpSize; }
  __device__ void sync() const { warp_sync(); }
  // Orders the lanes' stores before any lane's next signal: on AMD a wave issues one stream of memory instructions; on
  // NVIDIA the warp barrier orders memory among its lanes.
  __device__ void release_sync() const { warp_sync(); }
  template <class T>
  __device__ T broadcast(T value, int lane = 0) const {
    return shuffle(value, lane);
  }
  // Orders memory like sync(): a vote alone orders nothing (found by compute-sanitizer's racecheck).
  __device__ bool any(bool value) const {
    const bool any_lane = warp_any(value);
    warp_sync();
    return any_lane;
  }
  __device__ int count(bool value) const { return count_ones(warp_ballot(value)); }
  __device__ int32_t last(int32_t value) const { return shuffle(value, kWarpSize - 1); }
  __device__ uint64_t reduce_or(uint64_t bits) const { return warp_or(bits); }
  template <class T>
  __device__ T inclusive_sum(T value) const {
    return warp_inclusive_sum(value);
  }
  // Compares the lowest `num_bits` bits of the values, or a few more, by votes. (An H200's match instruction takes 370
  // cycles, and 1000 when 16 warps issue it at once.)
  __device__ Matches matches(int32_t value, int num_bits) const {
    constexpr int kVotesInFlight = 4;
    LaneMask same = ~LaneMask{0};
    MOE_A2A_ROLLED
    for (int first = 0; first < num_bits; first += kVotesInFlight) same &= equal_lanes<kVotesInFlight>(value >> first);
    return counted(same);
  }
  __device__ Matches matches(bool value) const { return counted(equal_lanes<1>(value)); }
  // The largest value among kLanes neighbours, kLanes a power of two; every one of them gets it. With 16 lanes 8
  // instructions on NVIDIA and 4 exchanges on AMD; cub::WarpReduce takes 85, rocprim::warp_reduce (ROCm 7) 5 exchanges.
  template <int kLanes, class T>
  __device__ T max_of_neighbours(T value) const {
    MOE_A2A_UNROLL
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      const T other = shuffle_across(value, distance);
      value = larger(other, value);
    }
    return value;
  }
  template <int kLanes, int kCount>
  __device__ float largest_magnitude(const float (&values)[kCount], float least) const {
    MOE_A2A_UNROLL
    for (int i = 0; i < kCount; ++i) least = larger(fabsf(values[i]), least);
    return max_of_neighbours<kLanes>(least);
  }

 private:
  __device__ Matches counted(LaneMask same) const {
    return {count_ones(same & ((LaneMask{1} << rank()) - 1)), count_ones(same)};
  }
};

struct Block {
  struct Scratch {
    uint32_t num_warps_done;
  };
  __device__ explicit Block(Scratch& scratch, int num_threads = kBlockThreads)
      : scratch_(scratch), num_threads_(num_threads) {
    if (rank() == 0) scratch_.num_warps_done = 0;
    sync();
  }

  __device__ int rank() const { return thread_in_block(); }
  __device__ int size() const { return num_threads_; }
  __device__ void sync() const { block_sync(); }
  // On gfx90a, gfx942 and gfx950 a plain barrier does not wait for the other waves' global stores, so a leader that
  // signals after it could overtake them. drain_stores() waits for them; it is empty on NVIDIA.
  __device__ void release_sync() const {
    drain_stores();
    block_sync();
  }
  __device__ bool any(bool value) const { return block_any(value); }

  // Called once per launch by every warp: true in the leader of the first one, once all have called it. The warps'
  // earlier accesses happen before what that thread does next. Only the first warp waits, which has the least other
  // work.
  __device__ bool is_closing_warp() const {
    drain_stores();
    warp_sync();
    if (rank() % kWarpSize != 0) return false;
    if (rank() != 0) {
      atomic_add<Order::kRelease, Scope::kBlock>(&scratch_.num_warps_done, 1u);
      return false;
    }
    const auto num_others = static_cast<uint32_t>(num_warps() - 1);
    while (atomic_load<Order::kAcquire, Scope::kBlock>(&scratch_.num_warps_done) != num_others) pause();
    return true;
  }

  __device__ Warp warp() const { return {}; }
  __device__ int warp_rank() const { return thread_in_block() / kWarpSize; }
  __device__ int num_warps() const { return num_threads_ / kWarpSize; }

 private:
  Scratch& scratch_;
  int num_threads_;
};

struct Grid {
  int block_rank, num_blocks;
  __device__ int rank() const { return block_rank; }
  __device__ int size() const { return num_blocks; }
};

// ---- memory

// A T per warp, for the duration of a launch.
template <class T>
__device__ T& warp_memory() {
  __shared__ T of_warp[kBlockThreads / kWarpSize];
  return of_warp[thread_in_block() / kWarpSize];
}

template <class T>
__device__ T load_from(const T* address, bool in_shared) {
  return in_shared ? load_shared(address) : load_global(address);
}

// Copies `count` vectors; each thread loads `kUnroll` of them before it stores the first.
template <class Group, class Members, class Target>
__device__ void multicast_vectors(const Group& group, const Members& members, int turn, Target target,
                                  const void* source, int64_t count, bool in_shared) {
  constexpr int kUnroll = 4;
  const Vec16* from = static_cast<const Vec16*>(source);
  const int64_t stride = group.size();
  for (int64_t i = group.rank(); i < count; i += kUnroll * stride) {
    // Set to zero because not all are loaded: else each would keep its last value, in a register or on the stack.
    Vec16 vector[kUnroll] = {};
    MOE_A2A_UNROLL
    for (int j = 0; j < kUnroll; ++j) {
      if (i + j * stride < count) vector[j] = load_from(from + i + j * stride, in_shared);
    }
    members.visit_from(turn, [&](int rank) {
      Vec16* to = reinterpret_cast<Vec16*>(target(rank));
      MOE_A2A_UNROLL
      for (int j = 0; j < kUnroll; ++j) {
        if (i + j * stride < count) store_global(to + i + j * stride, vector[j]);
      }
    });
  }
}

template <class Piece>
__device__ void copy_pieces(int first, int stride, void* target, const void* source, int64_t bytes, bool in_shared) {
  const int64_t count = bytes / static_cast<int64_t>(sizeof(Piece));
  for (int64_t i = first; i < count; i += stride) {
    store_global(static_cast<Piece*>(target) + i, load_from(static_cast<const Piece*>(source) + i, in_shared));
  }
}

// A row whose size or place is not a multiple of 16 bytes, copied by threads `first`, `first + stride`, ... Takes
// values only: an object that is passed by reference lives in memory on the common path, too.
MOE_A2A_RARE void copy_small_pieces(int first, int stride, void* target, const void* source, int64_t bytes,
                                    bool in_shared, uint64_t misalignment) {
  if (misalignment % 4 == 0) {
    copy_pieces<uint32_t>(first, stride, target, source, bytes, in_shared);
  } else if (misalignment % 2 == 0) {
    copy_pieces<uint16_t>(first, stride, target, source, bytes, in_shared);
  } else {
    copy_pieces<uint8_t>(first, stride, target, source, bytes, in_shared);
  }
}

// Copies `bytes` from `source` to `target(i)` for each i of `members` (see RankSet), starting with `turn`, and reads
// the source once. Targets are 16-byte aligned; a source that is not is copied in smaller pieces, and read once for
// each target. `in_shared`: the source is in the block's shared memory.
template <class Group, class Members, class Target>
__device__ void multicast_bytes(const Group& group, const Members& members, int turn, Target target, const void* source,
                                int64_t bytes, bool in_shared = false) {
  const uint64_t misalignment = reinterpret_cast<uint64_t>(source) | static_cast<uint64_t>(bytes) |
                                reinterpret_cast<uint64_t>(target(members.first()));
  if (misalignment % 16 == 0) {
    multicast_vectors(group, members, turn, target, source, bytes / 16, in_shared);
  } else {
    members.visit_from(turn, [&](int rank) {
      copy_small_pieces(group.rank(), group.size(), target(rank), source, bytes, in_shared, misalignment);
    });
  }
}

template <int kBytes>
struct BitsOf;
template <>
struct BitsOf<2> {
  using type = uint16_t;
};
template <>
struct BitsOf<4> {
  using type = uint32_t;
};
template <>
struct BitsOf<8> {
  using type = uint64_t;
};
template <>
struct BitsOf<16> {
  using type = Vec16;
};

inline constexpr bool kBlocksAreUnequal = true;  // see comm/work_queue.h
inline constexpr bool kRanksShareCores = false;
inline constexpr uint32_t kPollsPerLook = 64;  // see comm/wait.h

// As many elements as 16 bytes hold.
template <class T>
inline constexpr int kLaneElements = 16 / sizeof(T);
inline constexpr bool kAlignedVectors = true;
inline constexpr int kLaneUnroll = 2;
inline constexpr int kRowsInFlight = 4;
// Consecutive values per thread of a quantiser, and how many such sets it loads at a time. More values per thread means
// less redundant work per block of 128: two vectors on NVIDIA (H200, 4096 tokens: 24 blocks 214 us with one, 168 with
// two; 132 blocks 117 and 114), one on AMD, which lacks the scalar registers for two.
template <class T>
inline constexpr int kQuantizeElements = (kWarpSize == 32 ? 32 : 16) / sizeof(T);
inline constexpr int kQuantizeUnroll = 2;

template <class T>
struct alignas(16) LaneVector {
  T element[kLaneElements<T>];
};

// A lane's piece, loaded. As whole words: the compiler would give each 16-bit element its own register.
template <class T>
struct LoadedLane {
  Vec16 bits;
};

template <class T>
__device__ void load_lane(LoadedLane<T>& lane, const T* source) {
  lane.bits = load_global(reinterpret_cast<const Vec16*>(source));
}

// Its i-th element. A bfloat16 is the upper half of its float: one instruction, spelled out for the compiler.
template <class T>
__device__ float value_of(const LoadedLane<T>& lane, int i) {
  if constexpr (std::is_same_v<T, Bfloat16>) {
    const uint32_t words[] = {lane.bits.x, lane.bits.y, lane.bits.z, lane.bits.w}, word = words[i / 2];
    const uint32_t bits = i % 2 == 0 ? word << 16 : word & 0xffff0000u;
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
  } else {
    LaneVector<T> vector;
    memcpy(&vector, &lane.bits, sizeof(vector));
    return to_float(vector.element[i]);
  }
}

template <class T>
__device__ void store_lane(T* target, const LaneVector<T>& vector) {
  Vec16 bits;
  memcpy(&bits, &vector, sizeof(bits));
  *reinterpret_cast<Vec16*>(target) = bits;  // global or shared
}

// Consecutive values between memory and a lane, kCount * sizeof(T) bytes: 2, 4, 8 or 16.
template <int kCount, class T>
__device__ void load_values(T (&values)[kCount], const T* source, bool in_shared = false) {
  using Bits = typename BitsOf<kCount * sizeof(T)>::type;
  const Bits bits = load_from(reinterpret_cast<const Bits*>(source), in_shared);
  memcpy(static_cast<void*>(values), &bits, sizeof(values));
}
template <int kCount, class T>
__device__ void store_values(T* target, const T (&values)[kCount]) {
  using Bits = typename BitsOf<kCount * sizeof(T)>::type;
  Bits bits;
  memcpy(&bits, values, sizeof(bits));
  *reinterpret_cast<Bits*>(target) = bits;  // global or shared
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
