// Where a function may run, and which variant of the kernels is compiled. The words that headers shared by host and
// kernels need before they know the target.
#pragma once

// The kernels are compiled twice, with the recorder of the trace and bare, each in a namespace of its own. (On H200 the
// branches around a recorder that is off are 4 % of a small batch.)
#if !defined(MOE_A2A_RECORDING)
#define MOE_A2A_RECORDING 1
#endif
#if MOE_A2A_RECORDING
#define MOE_A2A_VARIANT_OF(target) target
#else
#define MOE_A2A_VARIANT_OF(target) target##_bare
#endif

#if defined(__HIP__) || defined(__CUDACC__)
// Spelled out: HIP defines __forceinline__ in a header that comes later.
#define MOE_A2A_DEVICE __device__ inline __attribute__((always_inline))
#define MOE_A2A_HOST_DEVICE __host__ __device__ inline __attribute__((always_inline))
// Before a loop over a lane's own array, which is in registers only when every index is known.
#define MOE_A2A_UNROLL _Pragma("unroll")
// Before a loop that goes round a few times in a small batch, which is the time of its instructions: unrolled, those of
// rounds that do not come are gone through as well. (H200: the sums of the lists took 4.6 us, now 2.)
#define MOE_A2A_ROLLED _Pragma("unroll 1")
// What is rarely run is called, so that it does not lie between what is run each time: a small batch is the time of its
// instructions. A function that is called needs a stack on AMD, so there it stays.
#if defined(__CUDACC__)
#define MOE_A2A_RARE __device__ __noinline__ static
#else
#define MOE_A2A_RARE MOE_A2A_DEVICE
#endif
#else
#define MOE_A2A_RARE inline
#define MOE_A2A_UNROLL
#define MOE_A2A_ROLLED
#define MOE_A2A_DEVICE inline
#define MOE_A2A_HOST_DEVICE inline
#endif
