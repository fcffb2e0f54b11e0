// The HIP target: what is specific to AMD. What it shares with NVIDIA is in simt.h and simt_machine.h.
#pragma once

#include <hip/hip_runtime.h>

#include <cstddef>
#include <cstdint>
#include <string>
#if !__has_include(<rocprim/rocprim.hpp>)
#error "the headers of rocPRIM are missing: install ROCm's package rocprim-dev (or rocprim-devel)"
#endif
#include <rocprim/warp/warp_reduce.hpp>
#include <rocprim/warp/warp_scan.hpp>

#include "arch/attributes.h"
#include "arch/dies.h"
#include "arch/matches.h"
#include "arch/number.h"
#include "arch/order.h"
#include "arch/soft_float8.h"

#define MOE_A2A_TARGET MOE_A2A_VARIANT_OF(hip)
#define MOE_A2A_KERNEL_ARGUMENT const
#define MOE_A2A_GPU(name) hip##name

namespace moe_a2a::inline MOE_A2A_TARGET {

inline constexpr int kWarpSize = 64;  // our own constant: gfx9 only, and compilers have stopped defining one
inline constexpr int kBlockThreads = 512;
#if defined(__gfx942__)
inline constexpr float kFloat8Max = 240.0f;  // e4m3fnuz
#else
inline constexpr float kFloat8Max = 448.0f;  // e4m3fn
#endif

// ---- threads

__device__ __forceinline__ int thread_in_block() { return static_cast<int>(threadIdx.x); }
__device__ __forceinline__ int block_in_grid() { return static_cast<int>(blockIdx.x); }
__device__ __forceinline__ int blocks_in_grid() { return static_cast<int>(gridDim.x); }
// The lanes of a wave run in lockstep; only the compiler must not reorder their memory accesses.
__device__ __forceinline__ void warp_sync() { __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront"); }
__device__ __forceinline__ void block_sync() { __syncthreads(); }
__device__ __forceinline__ void drain_stores() { asm volatile("s_waitcnt vmcnt(0)" ::: "memory"); }
__device__ __forceinline__ bool warp_any(bool value) { return __any(value); }
struct BitOr {
  __device__ __forceinline__ uint64_t operator()(uint64_t a, uint64_t b) const { return a | b; }
};
__device__ __forceinline__ uint64_t warp_or(uint64_t bits) {
  using Reduce = rocprim::warp_reduce<uint64_t, kWarpSize, true>;
  typename Reduce::storage_type unused;
  Reduce().reduce(bits, bits, unused, BitOr{});
  return bits;
}
template <class T>
__device__ __forceinline__ T warp_inclusive_sum(T value) {
  using Scan = rocprim::warp_scan<T, kWarpSize>;
  typename Scan::storage_type unused;
  Scan().inclusive_scan(value, value, unused);
  return value;
}
using LaneMask = uint64_t;  // one bit per lane
__device__ __forceinline__ LaneMask warp_ballot(bool value) { return __ballot(value); }
__device__ __forceinline__ int count_ones(LaneMask word) { return __popcll(word); }
// The lanes whose values have the same lowest kBits bits. rocprim::match_any (ROCm 6 and later) makes the loop of
// Warp::matches() 42 instructions long on gfx942, this 33.
template <int kBits>
__device__ __forceinline__ LaneMask equal_lanes(int32_t value) {
  LaneMask different = 0;
#pragma unroll
  for (int i = 0; i < kBits; ++i) {
    const int32_t bit = (value << (31 - i)) >> 31;  // 0 or -1
    different |= warp_ballot(bit) ^ static_cast<LaneMask>(int64_t{bit});
  }
  return ~different;
}
__device__ __forceinline__ bool block_any(bool value) { return __syncthreads_or(value); }
template <class T>
__device__ __forceinline__ T shuffle(T value, int lane) {
  return __shfl(value, lane);
}
template <class T>
__device__ __forceinline__ T shuffle_across(T value, int distance) {
  return __shfl_xor(value, distance);
}

__host__ __device__ __forceinline__ int count_trailing_zeros(uint64_t word) { return __builtin_ctzll(word); }

// ---- memory

constexpr int to_builtin(Order order) {
  return order == Order::kRelaxed   ? __ATOMIC_RELAXED
         : order == Order::kAcquire ? __ATOMIC_ACQUIRE
         : order == Order::kRelease ? __ATOMIC_RELEASE
                                    : __ATOMIC_ACQ_REL;
}
constexpr int to_builtin(Scope scope) {
  return scope == Scope::kBlock    ? __HIP_MEMORY_SCOPE_WORKGROUP
         : scope == Scope::kDevice ? __HIP_MEMORY_SCOPE_AGENT
                                   : __HIP_MEMORY_SCOPE_SYSTEM;
}

template <Order kOrder, Scope kScope, class T>
__device__ __forceinline__ T atomic_load(const T* address) {
  return __hip_atomic_load(address, to_builtin(kOrder), to_builtin(kScope));
}
template <Order kOrder, Scope kScope, class T>
__device__ __forceinline__ void atomic_store(T* address, T value) {
  __hip_atomic_store(address, value, to_builtin(kOrder), to_builtin(kScope));
}
template <Order kOrder, Scope kScope, class T>
__device__ __forceinline__ T atomic_add(T* address, T value) {
  return __hip_atomic_fetch_add(address, value, to_builtin(kOrder), to_builtin(kScope));
}
template <Order kOrder, Scope kScope, class T>
__device__ __forceinline__ bool atomic_claim(T* address, T expected, T desired) {
  return __hip_atomic_compare_exchange_strong(address, &expected, desired, to_builtin(kOrder), __ATOMIC_RELAXED,
                                              to_builtin(kScope));
}

// One cache write-back and one wait order all earlier writes before every relaxed signal after them. The wait is
// explicit: up to clang 22 the compiler does not count the write-back as in flight, and drops the fence's own wait if
// it sees no other memory operation of this wave (LLVM pull request 178316).
template <Scope kScope = Scope::kSystem>
__device__ __forceinline__ void fence_before_signals() {
  if constexpr (kScope == Scope::kSystem) {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "");
  } else {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
  }
  drain_stores();
}
inline constexpr Order kSignalOrder = Order::kRelaxed;
inline constexpr bool kLaunchesRelease = false;       // see comm/signal.h
inline constexpr bool kOneWarpPublishes = false;      // see comm/signal_queue.h; not measured
inline constexpr Order kPollOrder = Order::kRelaxed;  // an acquire per poll would invalidate the cache per poll
using LlBits = uint64_t;                              // see comm/ll_word.h

// Naming the address space avoids generic (flat) accesses, which count against both global and shared memory.
typedef uint32_t Vec16 __attribute__((ext_vector_type(4)));
template <class T>
__device__ __forceinline__ T load_global(const T* address) {
  return *reinterpret_cast<const __attribute__((address_space(1))) T*>(reinterpret_cast<uint64_t>(address));
}
template <class T>
__device__ __forceinline__ T load_shared(const T* address) {
  return *(const __attribute__((address_space(3))) T*)address;
}
template <class T>
__device__ __forceinline__ void store_global(T* address, T value) {
  *reinterpret_cast<__attribute__((address_space(1))) T*>(reinterpret_cast<uint64_t>(address)) = value;
}

// The kernel's arguments, in place. Otherwise the compiler would load most of that kilobyte early, into about a hundred
// scalar registers. The asm hides where the address comes from, so each argument is loaded where it is used.
template <class Args>
__device__ __forceinline__ const Args& arguments_in_memory(const Args&) {
  using Place = const __attribute__((address_space(4))) Args*;
  Place place = (Place)__builtin_amdgcn_kernarg_segment_ptr();  // the only argument: at the start
  asm volatile("" : "+s"(place));
  return *(const Args*)place;
}

__device__ __forceinline__ void prefetch(const void*) {}  // gfx9 has no data prefetch

// ---- numbers

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(Half value) {
  return static_cast<float>(__builtin_bit_cast(_Float16, value.bits));
}
__device__ __forceinline__ float to_float(Bfloat16 value) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(value.bits) << 16);
}

template <class T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ Half from_float<Half>(float value) {
  return {__builtin_bit_cast(uint16_t, static_cast<_Float16>(value))};
}
template <>
__device__ __forceinline__ Bfloat16 from_float<Bfloat16>(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
  return {static_cast<uint16_t>(value != value ? 0x7fc0u : rounded)};
}
template <>
__device__ __forceinline__ Float8 from_float<Float8>(float value) {
#if defined(__gfx942__) || defined(__gfx950__)
  const float clamped = value > kFloat8Max ? kFloat8Max : value < -kFloat8Max ? -kFloat8Max : value;
  return {static_cast<uint8_t>(__builtin_amdgcn_cvt_pk_fp8_f32(clamped, clamped, 0, false))};
#else
  return soft_float8(value);  // gfx90a has no float8 instructions
#endif
}
__device__ __forceinline__ float to_float(Float8 value) {
#if defined(__gfx942__) || defined(__gfx950__)
  return __builtin_amdgcn_cvt_f32_fp8(value.bits, 0);
#else
  return soft_to_float(value);
#endif
}
template <int kCount>
__device__ __forceinline__ void to_float8(const float (&values)[kCount], float factor, Float8 (&codes)[kCount]) {
  MOE_A2A_UNROLL
  for (int i = 0; i < kCount; ++i) codes[i] = from_float<Float8>(values[i] * factor);
}
__device__ __forceinline__ float larger(float a, float b) { return a > b ? a : b; }
__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }
__device__ __forceinline__ float sigmoid(float value) { return __builtin_amdgcn_rcpf(1.0f + __expf(-value)); }
__device__ __forceinline__ float error_function(float value) { return erff(value); }

// ---- time

__device__ __forceinline__ uint64_t clock_now() { return wall_clock64(); }  // see clock_ticks_per_second()
__device__ __forceinline__ void pause(uint32_t /*polls*/ = 0) { __builtin_amdgcn_s_sleep(1); }

// The host cannot end a wait on a device.
__device__ __forceinline__ bool is_interrupted() { return false; }

// ---- machine code, see cmake/gpu_architectures.cmake

inline constexpr auto kNoCodeForDevice = hipErrorNoBinaryForGpu;
inline constexpr const char* kArchitecturesVariable = "PYTORCH_ROCM_ARCH";
inline std::string architecture_of(int device) {
  hipDeviceProp_t properties = {};
  (void)hipGetDeviceProperties(&properties, device);
  return properties.gcnArchName;
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET

// clang-format off: each needs the ones before it
#include "arch/simt.h"
#include "arch/streamed_sums.h"
#include "arch/row_sender.h"
#include "arch/hip_warp_matrix.h"
#include "arch/simt_block_tile.h"
#include "arch/simt_machine.h"
#include "arch/simt_launch.h"
// clang-format on

namespace moe_a2a::inline MOE_A2A_TARGET {

struct HipVendor {
  static constexpr auto kMultiprocessorCount = hipDeviceAttributeMultiprocessorCount;
  static constexpr auto kMaxSharedMemory = hipDeviceAttributeMaxSharedMemoryPerBlock;
  static int num_resident_blocks(int device, int compute_units) {
    return is_mi200(device) ? resident_blocks_of_mi200(compute_units) : compute_units;
  }
  static int num_dies(int device, int compute_units) {
    return is_mi200(device) ? 1 : most_dies_of_mi300(compute_units);
  }
  static bool is_mi200(int device) { return architecture_of(device).starts_with("gfx90a"); }
  // Uncached or fine-grained: a stale line in this device's cache must not hide a peer's store.
  static hipError_t malloc_symmetric(void** memory, size_t nbytes) {
#if defined(hipDeviceMallocUncached)
    return hipExtMallocWithFlags(memory, nbytes, hipDeviceMallocUncached);
#else
    return hipExtMallocWithFlags(memory, nbytes, hipDeviceMallocFinegrained);
#endif
  }
  static hipError_t malloc_host(void** memory, size_t nbytes) {
    return hipHostMalloc(memory, nbytes, hipHostMallocPortable | hipHostMallocMapped);
  }
  static size_t size_of_mapping(void* memory) {
    hipDeviceptr_t start = nullptr;
    size_t nbytes = 0;
    if (hipMemGetAddressRange(&start, &nbytes, memory) == hipSuccess) return nbytes;
    (void)hipGetLastError();
    return 0;
  }
  static hipError_t free_host(void* memory) { return hipHostFree(memory); }
  static double clock_ticks_per_second(int device) {
    int kilohertz = 100'000;
    (void)hipDeviceGetAttribute(&kilohertz, hipDeviceAttributeWallClockRate, device);
    return kilohertz * 1e3;
  }
};
using Machine = SimtMachine<HipVendor>;

}  // namespace moe_a2a::inline MOE_A2A_TARGET
