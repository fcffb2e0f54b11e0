// The CUDA target: what is specific to NVIDIA. What it shares with AMD is in simt.h and simt_machine.h.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cub/util_ptx.cuh>
#include <cub/warp/warp_scan.cuh>
#include <cuda/atomic>
#include <string>

#include "arch/attributes.h"
#include "arch/matches.h"
#include "arch/number.h"
#include "arch/order.h"

#define MOE_A2A_TARGET MOE_A2A_VARIANT_OF(cuda)
#define MOE_A2A_KERNEL_ARGUMENT const __grid_constant__
#define MOE_A2A_GPU(name) cuda##name

namespace moe_a2a::inline MOE_A2A_TARGET {

inline constexpr int kWarpSize = 32;
inline constexpr int kBlockThreads = 512;
inline constexpr float kFloat8Max = 448.0f;  // e4m3fn

// ---- threads

__device__ __forceinline__ int thread_in_block() { return static_cast<int>(threadIdx.x); }
__device__ __forceinline__ int block_in_grid() { return static_cast<int>(blockIdx.x); }
__device__ __forceinline__ int blocks_in_grid() { return static_cast<int>(gridDim.x); }
__device__ __forceinline__ void warp_sync() { __syncwarp(); }
__device__ __forceinline__ void block_sync() { __syncthreads(); }
__device__ __forceinline__ void drain_stores() {}  // the barrier orders the block's stores before the leader's fence
__device__ __forceinline__ bool warp_any(bool value) { return __any_sync(0xffffffffu, value); }
// One instruction per half; cub::WarpReduce uses it since CUB 3.5 and shuffles ten times before (CUDA 13.0 has 3.0).
__device__ __forceinline__ uint64_t warp_or(uint64_t bits) {
  return uint64_t{__reduce_or_sync(0xffffffffu, static_cast<uint32_t>(bits >> 32))} << 32 |
         __reduce_or_sync(0xffffffffu, static_cast<uint32_t>(bits));
}
template <class T>
__device__ __forceinline__ T warp_inclusive_sum(T value) {
  using Scan = cub::WarpScan<T, kWarpSize>;
  typename Scan::TempStorage unused;
  Scan(unused).InclusiveSum(value, value);
  return value;
}
using LaneMask = uint32_t;  // one bit per lane
__device__ __forceinline__ LaneMask warp_ballot(bool value) { return __ballot_sync(0xffffffffu, value); }
__device__ __forceinline__ int count_ones(LaneMask word) { return __popc(word); }
// The lanes whose values have the same lowest kBits bits.
template <int kBits>
__device__ __forceinline__ LaneMask equal_lanes(int32_t value) {
  return cub::MatchAny<kBits>(static_cast<uint32_t>(value));
}
__device__ __forceinline__ bool block_any(bool value) { return __syncthreads_or(value); }
template <class T>
__device__ __forceinline__ T shuffle(T value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}
template <class T>
__device__ __forceinline__ T shuffle_across(T value, int distance) {
  return __shfl_xor_sync(0xffffffffu, value, distance);
}

__host__ __device__ __forceinline__ int count_trailing_zeros(uint64_t word) {
#if defined(__CUDA_ARCH__)
  return __ffsll(static_cast<long long>(word)) - 1;
#else
  return __builtin_ctzll(word);
#endif
}

// ---- memory

MOE_A2A_HOST_DEVICE constexpr ::cuda::std::memory_order to_builtin(Order order) {
  return order == Order::kRelaxed   ? ::cuda::std::memory_order_relaxed
         : order == Order::kAcquire ? ::cuda::std::memory_order_acquire
         : order == Order::kRelease ? ::cuda::std::memory_order_release
                                    : ::cuda::std::memory_order_acq_rel;
}
MOE_A2A_HOST_DEVICE constexpr ::cuda::thread_scope to_builtin(Scope scope) {
  return scope == Scope::kBlock    ? ::cuda::thread_scope_block
         : scope == Scope::kDevice ? ::cuda::thread_scope_device
                                   : ::cuda::thread_scope_system;
}

template <Order kOrder, Scope kScope, class T>
__device__ __forceinline__ T atomic_load(const T* address) {
  return ::cuda::atomic_ref<T, to_builtin(kScope)>(*const_cast<T*>(address)).load(to_builtin(kOrder));
}
template <Order kOrder, Scope kScope, class T>
__device__ __forceinline__ void atomic_store(T* address, T value) {
  ::cuda::atomic_ref<T, to_builtin(kScope)>(*address).store(value, to_builtin(kOrder));
}
template <Order kOrder, Scope kScope, class T>
__device__ __forceinline__ T atomic_add(T* address, T value) {
  // Block-scope counters are in shared memory. The compiler can tell that from atomicAdd_block(), never from
  // atomic_ref.
  if constexpr (kOrder == Order::kRelaxed && kScope == Scope::kBlock) return atomicAdd_block(address, value);
  return ::cuda::atomic_ref<T, to_builtin(kScope)>(*address).fetch_add(value, to_builtin(kOrder));
}
template <Order kOrder, Scope kScope, class T>
__device__ __forceinline__ bool atomic_claim(T* address, T expected, T desired) {
  return ::cuda::atomic_ref<T, to_builtin(kScope)>(*address).compare_exchange_strong(expected, desired,
                                                                                     to_builtin(kOrder));
}

// One fence orders all earlier writes before every relaxed signal after it.
template <Scope kScope = Scope::kSystem>
__device__ __forceinline__ void fence_before_signals() {
  ::cuda::atomic_thread_fence(::cuda::std::memory_order_release, to_builtin(kScope));
}
inline constexpr Order kSignalOrder = Order::kRelaxed;
// What a launch has done is complete in the device's memory when the next one begins, and links read it there. NCCL and
// PyTorch's symmetric memory rest on that, too.
inline constexpr bool kLaunchesRelease = true;
// One warp of each block does the fences for all, see comm/signal_queue.h.
inline constexpr bool kOneWarpPublishes = true;
// Acquiring on every poll costs only L1 lines; a second load of the word costs 0.7 us.
inline constexpr Order kPollOrder = Order::kAcquire;

__device__ __forceinline__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(__cvta_generic_to_global(address)));
}

using Vec16 = uint4;

// 16-byte accesses that never tear. The load is volatile: ptxas turns a relaxed one into a load per part where a kernel
// uses only some parts, and then a new stamp may come with old data (H200: one all-reduce in 300 as LL words was
// wrong).
using LlBits = Vec16;  // see comm/ll_word.h
__device__ __forceinline__ Vec16 load_whole(const Vec16* address) {
  uint64_t low, high;
  asm volatile("{ .reg .b128 w; ld.volatile.global.b128 w, [%2]; mov.b128 {%0, %1}, w; }"
               : "=l"(low), "=l"(high)
               : "l"(__cvta_generic_to_global(address))
               : "memory");
  return {static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high),
          static_cast<uint32_t>(high >> 32)};
}
__device__ __forceinline__ void store_whole(Vec16* address, const Vec16& value) {
  const uint64_t low = uint64_t{value.y} << 32 | value.x, high = uint64_t{value.w} << 32 | value.z;
  asm volatile("{ .reg .b128 w; mov.b128 w, {%1, %2}; st.relaxed.sys.global.b128 [%0], w; }" ::"l"(
                   __cvta_generic_to_global(address)),
               "l"(low), "l"(high)
               : "memory");
}
template <class T>
__device__ __forceinline__ T load_global(const T* address) {
  return *address;
}
template <class T>
__device__ __forceinline__ T load_shared(const T* address) {
  return *address;
}
template <class T>
__device__ __forceinline__ void store_global(T* address, T value) {
  *address = value;
}

template <class Args>
__device__ __forceinline__ const Args& arguments_in_memory(const Args& args) {
  return args;  // __grid_constant__: they stay in constant memory
}

// ---- numbers

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(Half value) { return __half2float(__ushort_as_half(value.bits)); }
__device__ __forceinline__ float to_float(Bfloat16 value) {
  return __uint_as_float(static_cast<uint32_t>(value.bits) << 16);
}

template <class T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ Half from_float<Half>(float value) {
  return {__half_as_ushort(__float2half_rn(value))};
}
template <>
__device__ __forceinline__ Bfloat16 from_float<Bfloat16>(float value) {
  return {__bfloat16_as_ushort(__float2bfloat16_rn(value))};
}
template <>
__device__ __forceinline__ Float8 from_float<Float8>(float value) {
  return {static_cast<uint8_t>(__nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3))};
}
__device__ __forceinline__ float to_float(Float8 value) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(value.bits, __NV_E4M3)));
}
// The values times `factor`, two per instruction.
template <int kCount>
__device__ __forceinline__ void to_float8(const float (&values)[kCount], float factor, Float8 (&codes)[kCount]) {
  static_assert(kCount % 2 == 0);
  MOE_A2A_UNROLL
  for (int i = 0; i < kCount; i += 2) {
    const float2 pair = make_float2(values[i] * factor, values[i + 1] * factor);
    const auto bits = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
    codes[i] = {static_cast<uint8_t>(bits)};
    codes[i + 1] = {static_cast<uint8_t>(bits >> 8)};
  }
}
__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }
__device__ __forceinline__ float sigmoid(float value) { return __fdividef(1.0f, 1.0f + __expf(-value)); }
__device__ __forceinline__ float error_function(float value) { return erff(value); }

// ---- time

__device__ __forceinline__ uint64_t clock_now() {  // nanoseconds, in steps of 32 on H200
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
__device__ __forceinline__ void pause(uint32_t /*polls*/ = 0) { __nanosleep(20); }

// The host cannot end a wait on a device.
__device__ __forceinline__ bool is_interrupted() { return false; }

// ---- machine code, see cmake/gpu_architectures.cmake

inline constexpr auto kNoCodeForDevice = cudaErrorNoKernelImageForDevice;
inline constexpr const char* kArchitecturesVariable = "TORCH_CUDA_ARCH_LIST";
inline std::string architecture_of(int device) {
  int major = 0, minor = 0;
  (void)cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  (void)cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  return std::to_string(major) + "." + std::to_string(minor);
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET

// clang-format off: each needs the ones before it
#include "arch/simt.h"
#include "arch/cuda_row_sender.h"
#include "arch/cuda_streamed_sums.h"
#include "arch/cuda_warp_matrix.h"
#include "arch/simt_block_tile.h"
#include "arch/simt_machine.h"
#include "arch/simt_launch.h"
#include "arch/cuda_tile_pipeline.h"
#include "arch/cuda_warp_group_matrix.h"
#include "arch/cuda_few_rows_matrix.h"
#include "arch/cuda_tile_launch.h"
// clang-format on

namespace moe_a2a::inline MOE_A2A_TARGET {

struct CudaVendor {
  static constexpr auto kMultiprocessorCount = cudaDevAttrMultiProcessorCount;
  static constexpr auto kMaxSharedMemory = cudaDevAttrMaxSharedMemoryPerBlockOptin;
  static int num_resident_blocks(int, int multiprocessors) { return multiprocessors; }
  static int num_dies(int, int) { return 1; }
  static cudaError_t malloc_symmetric(void** memory, size_t nbytes) { return cudaMalloc(memory, nbytes); }
  static cudaError_t malloc_host(void** memory, size_t nbytes) {
    return cudaHostAlloc(memory, nbytes, cudaHostAllocPortable | cudaHostAllocMapped);
  }
  static cudaError_t free_host(void* memory) { return cudaFreeHost(memory); }
  // Obtained through the runtime, which has loaded the driver. The driver's library is not linked, so the package loads
  // without it.
  static size_t size_of_mapping([[maybe_unused]] void* memory) {
#if CUDART_VERSION >= 12050
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const auto error =
        cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &entry, 12050, cudaEnableDefault, &found);
    if (error == cudaSuccess && found == cudaDriverEntryPointSuccess) {
      using GetAddressRange = int (*)(unsigned long long* start, size_t* nbytes, unsigned long long address);
      unsigned long long start = 0;
      size_t nbytes = 0;
      if (reinterpret_cast<GetAddressRange>(entry)(&start, &nbytes, reinterpret_cast<uint64_t>(memory)) == 0) {
        return nbytes;
      }
    }
    (void)cudaGetLastError();
#endif
    return 0;
  }
  static double clock_ticks_per_second(int) { return 1e9; }
};
using Machine = SimtMachine<CudaVendor>;

}  // namespace moe_a2a::inline MOE_A2A_TARGET
