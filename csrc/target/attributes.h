// Where a function may run. The two words that headers shared by host and kernels need before they know the target.
#pragma once

#if defined(__HIP__) || defined(__CUDACC__)
// Spelled out: HIP defines __forceinline__ in a header that comes later.
#define MOE_A2A_DEVICE __device__ inline __attribute__((always_inline))
#define MOE_A2A_HOST_DEVICE __host__ __device__ inline __attribute__((always_inline))
#else
#define MOE_A2A_DEVICE inline
#define MOE_A2A_HOST_DEVICE inline
#endif
