// Products of an sm_90a warp group (wgmma): 64 x 256 sums in the registers of 128 threads, operands in shared memory.
#pragma once

namespace moe_a2a::inline MOE_A2A_TARGET {

// Describes a tile whose rows are 128 bytes along the summed dimension, in TMA's 128-byte swizzle: 16-byte piece i of
// row r is stored as piece i ^ (r % 8). Tiles are 1024-byte aligned.
__device__ __forceinline__ uint64_t describe_tile(uint32_t address) {
  return (uint64_t{1} << 62) | (uint64_t{1024 >> 4} << 32) | (uint64_t{1} << 16) | ((address & 0x3ffff) >> 4);
}

// Warp i of the group has rows 16 * i to 16 * i + 15.
struct WarpGroupSums {
  static constexpr int kRows = 64, kColumns = 256;
  float sum[128];

  // Index in sum[] of a pair of sums: row lane / 4 (+ 8 if `lower`) of the warp's 16, column(j) and the next.
  __device__ static constexpr int index(int j, bool lower) { return 4 * j + (lower ? 2 : 0); }
  __device__ static int column(int j) { return 8 * j + thread_in_block() % 4 * 2; }
};

template <class T>
struct WarpGroupMatrix : WarpGroupSums {
  static constexpr int kDepth = 64;

  // Starts the product of 64 rows and 256 columns, kDepth deep. `is_first`: overwrite the sums.
  __device__ __forceinline__ void start(uint32_t rows, uint32_t columns, bool is_first) {
    const uint64_t a = describe_tile(rows), b = describe_tile(columns);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) multiply(a + 2 * k, b + 2 * k, !is_first || k > 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  }
  // Waits until at most kCount of the started products are incomplete.
  template <int kCount>
  __device__ __forceinline__ void wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kCount) : "memory");
  }

 private:
  __device__ __forceinline__ void multiply(uint64_t a, uint64_t b, int adds);
};

// Float8: products of half the columns, 128 deep, which are scaled and then added to the sums.
template <>
struct WarpGroupMatrix<Float8> : WarpGroupSums {
  static constexpr int kDepth = 128;
  float product[64];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (float& s : sum) s = 0;
  }
  __device__ __forceinline__ void start(uint32_t rows, uint32_t columns) {
    const uint64_t a = describe_tile(rows), b = describe_tile(columns);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < kDepth / 32; ++k) multiply(a + 2 * k, b + 2 * k, k > 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  }
  // Names the product, so that no use of it moves before the wait.
  __device__ __forceinline__ void wait();
  // The scales are of the thread's two rows, times the columns'.
  __device__ __forceinline__ void add(int half, float upper, float lower) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      sum[64 * half + i] = __fmaf_rn(product[i], i / 2 % 2 == 0 ? upper : lower, sum[64 * half + i]);
    }
  }

 private:
  __device__ __forceinline__ void multiply(uint64_t a, uint64_t b, int adds);
};

// Packs two values as 16-bit numbers into one word.
template <class T>
__device__ __forceinline__ uint32_t pack(float first, float second) {
  if constexpr (std::is_same_v<T, Bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __half2 pair = __floats2half2_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

// The assembly must name every register of a product.
#define MOE_A2A_REGISTERS                                                                                          \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, " \
  "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, " \
  "%68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, " \
  "%90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, " \
  "%110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define MOE_A2A_REGISTERS_64                                                                             \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, " \
  "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, " \
  "%62, %63"
#define MOE_A2A_SUMS_4(sum, i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
#define MOE_A2A_SUMS_16(sum, i) \
  MOE_A2A_SUMS_4(sum, i), MOE_A2A_SUMS_4(sum, i + 4), MOE_A2A_SUMS_4(sum, i + 8), MOE_A2A_SUMS_4(sum, i + 12)
#define MOE_A2A_SUMS_64(sum, i) \
  MOE_A2A_SUMS_16(sum, i), MOE_A2A_SUMS_16(sum, i + 16), MOE_A2A_SUMS_16(sum, i + 32), MOE_A2A_SUMS_16(sum, i + 48)
#define MOE_A2A_MULTIPLY(type)                                                            \
  asm volatile(                                                                           \
      "{ .reg .pred adds; setp.ne.b32 adds, %130, 0;\n"                                   \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " {" MOE_A2A_REGISTERS \
      "}, %128, %129, adds, 1, 1, 0, 0; }"                                                \
      : MOE_A2A_SUMS_64(sum, 0), MOE_A2A_SUMS_64(sum, 64)                                 \
      : "l"(a), "l"(b), "r"(adds))

template <class T>
__device__ __forceinline__ void WarpGroupMatrix<T>::multiply(uint64_t a, uint64_t b, int adds) {
  if constexpr (std::is_same_v<T, Bfloat16>) {
    MOE_A2A_MULTIPLY("bf16");
  } else {
    MOE_A2A_MULTIPLY("f16");
  }
}

__device__ __forceinline__ void WarpGroupMatrix<Float8>::multiply(uint64_t a, uint64_t b, int adds) {
  asm volatile(
      "{ .reg .pred adds; setp.ne.b32 adds, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" MOE_A2A_REGISTERS_64 "}, %64, %65, adds, 1, 1; }"
      : MOE_A2A_SUMS_64(product, 0)
      : "l"(a), "l"(b), "r"(adds));
}

__device__ __forceinline__ void WarpGroupMatrix<Float8>::wait() {
  asm volatile("wgmma.wait_group.sync.aligned 0;" : MOE_A2A_SUMS_64(product, 0)::"memory");
}

#undef MOE_A2A_MULTIPLY
#undef MOE_A2A_SUMS_64
#undef MOE_A2A_SUMS_16
#undef MOE_A2A_SUMS_4
#undef MOE_A2A_REGISTERS_64
#undef MOE_A2A_REGISTERS

}  // namespace moe_a2a::inline MOE_A2A_TARGET
