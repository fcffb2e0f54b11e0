// Products of an sm_90a warp group for a float8 tile of few rows. wgmma multiplies 64 rows of its first operand by as
// few as 8 of its second, so the operands change places: columns of w are the 64, rows of x the few. ("swap AB")
#pragma once

#include "arch/cuda_tile_pipeline.h"
#include "arch/cuda_warp_group_matrix.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// kNumRows (16 or 32) rows by 64 columns of each half of a tile; the halves are kHalfBytes apart. Warp i of the group
// has columns 16 * i to 16 * i + 15.
template <int kNumRows, int kHalfBytes>
struct FewRowsMatrix {
  static constexpr int kCount = kNumRows / 2, kDepth = 128;
  float sum[2][kCount];

  // Of sum[half][i]: its column among the warp's 16; its row. row(j): of sums 4 * j and 4 * j + 2, of the next ones
  // one more.
  __device__ static int column_of(int i) { return thread_in_block() % kWarpSize / 4 + i / 2 % 2 * 8; }
  __device__ static int row_of(int i) { return row(i / 4) + i % 2; }
  __device__ static int row(int j) { return 8 * j + thread_in_block() % 4 * 2; }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum[0][i] = sum[1][i] = 0;
  }
  // Starts a product, kDepth deep, that overwrites the sums. columns: of the first half.
  __device__ __forceinline__ void start(uint32_t rows, uint32_t columns) {
    const uint64_t b = describe_tile(rows);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint64_t a = describe_tile(columns + half * kHalfBytes);
#pragma unroll
      for (int k = 0; k < kDepth / 32; ++k) multiply(sum[half], a + 2 * k, b + 2 * k, k > 0);
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  }
  // Names the sums, so that no use of them moves before the wait.
  __device__ __forceinline__ void wait() {
    wait_for(sum[0]);
    wait_for(sum[1]);
  }
  // Adds a scaled product. of_rows[j]: the scales of rows row(j) and the next.
  __device__ __forceinline__ void add(const FewRowsMatrix& product, const FloatPair (&of_rows)[kNumRows / 8],
                                      FloatPair of_halves) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float of_half = half == 0 ? of_halves.first : of_halves.second;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float of_row = i % 2 == 0 ? of_rows[i / 4].first : of_rows[i / 4].second;
        sum[half][i] = __fmaf_rn(product.sum[half][i], of_row * of_half, sum[half][i]);
      }
    }
  }

 private:
#define MOE_A2A_FOUR(v, i) "+f"(v[i]), "+f"(v[i + 1]), "+f"(v[i + 2]), "+f"(v[i + 3])
  __device__ __forceinline__ static void multiply(float (&v)[8], uint64_t a, uint64_t b, int adds) {
    asm volatile(
        "{ .reg .pred adds; setp.ne.b32 adds, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, adds, 1, 1; }"
        : MOE_A2A_FOUR(v, 0), MOE_A2A_FOUR(v, 4)
        : "l"(a), "l"(b), "r"(adds));
  }
  __device__ __forceinline__ static void multiply(float (&v)[16], uint64_t a, uint64_t b, int adds) {
    asm volatile(
        "{ .reg .pred adds; setp.ne.b32 adds, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
        "%13, %14, %15}, %16, %17, adds, 1, 1; }"
        : MOE_A2A_FOUR(v, 0), MOE_A2A_FOUR(v, 4), MOE_A2A_FOUR(v, 8), MOE_A2A_FOUR(v, 12)
        : "l"(a), "l"(b), "r"(adds));
  }
  __device__ __forceinline__ static void wait_for(float (&v)[8]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" : MOE_A2A_FOUR(v, 0), MOE_A2A_FOUR(v, 4)::"memory");
  }
  __device__ __forceinline__ static void wait_for(float (&v)[16]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;"
                 : MOE_A2A_FOUR(v, 0), MOE_A2A_FOUR(v, 4), MOE_A2A_FOUR(v, 8), MOE_A2A_FOUR(v, 12)::"memory");
  }
#undef MOE_A2A_FOUR
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
