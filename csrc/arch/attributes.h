// Where a function may run, and which variant of the kernels is compiled. Headers that host and kernels share need this
// before they know the target.
#pragma once

#define MOE_A2A_JOIN(a, b) MOE_A2A_JOIN_EXPANDED(a, b)
#define MOE_A2A_JOIN_EXPANDED(a, b) a##b

// GPU kernels are compiled twice, with the trace recorder and without, each in its own namespace. (H200: branches
// around a disabled recorder cost a small batch 4 %.) CPU kernels are compiled with it, and ask whether the trace is
// on.
#if !defined(MOE_A2A_RECORDING)
#define MOE_A2A_RECORDING 1
#endif
#if MOE_A2A_RECORDING
#define MOE_A2A_VARIANT_OF(target) target
#else
#define MOE_A2A_VARIANT_OF(target) target##_bare
#endif

#if defined(__HIP__) || defined(__CUDACC__)
#define MOE_A2A_RECORDS_ALWAYS 1
// Spelled out: HIP defines __forceinline__ only in a later header.
#define MOE_A2A_DEVICE __device__ inline __attribute__((always_inline))
#define MOE_A2A_HOST_DEVICE __host__ __device__ inline __attribute__((always_inline))
// For loops over a per-thread array: it stays in registers only if every index is a constant.
#define MOE_A2A_UNROLL _Pragma("unroll")
// For loops that run few iterations in a small batch, which is latency-bound by its instructions: unrolled, they would
// also step through the skipped iterations. (H200: summing the lists took 4.6 us, now 2.)
#define MOE_A2A_ROLLED _Pragma("unroll 1")
// Keep cold code out of line: small batches are latency-bound by their instructions. On AMD a called function needs a
// stack, so there it stays inline.
#if defined(__CUDACC__)
#define MOE_A2A_RARE __device__ __noinline__ static
// For a lambda that is most of a kernel: nvcc calls a large one out of line, where the kernel's arguments are slow to
// reach. (2 H100: a combine of 512 tokens took 62 us, now 56.)
#define MOE_A2A_INLINED __attribute__((always_inline))
#else
#define MOE_A2A_RARE MOE_A2A_DEVICE
#define MOE_A2A_INLINED
#endif
#else
#define MOE_A2A_RECORDS_ALWAYS 0
#define MOE_A2A_RARE inline
#define MOE_A2A_INLINED
#define MOE_A2A_UNROLL
#define MOE_A2A_ROLLED
#define MOE_A2A_DEVICE inline
#define MOE_A2A_HOST_DEVICE inline
#endif
