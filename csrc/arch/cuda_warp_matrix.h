// NVIDIA's WarpMatrix: mma.sync, from sm_80 on. See block_tile.h.
#pragma once

namespace moe_a2a::inline MOE_A2A_TARGET {

// d += a * b for 16 x 16 times 16 x 8.
template <class T>
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (std::is_same_v<T, Bfloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

template <class T>
struct WarpMatrix {
  static constexpr int kRows = 32, kColumns = 16, kValues = kRows * kColumns / kWarpSize;
  float value[kValues];  // 2 x 2 products of 16 x 8, 4 values each

  __device__ void clear() {
#pragma unroll
    for (float& v : value) v = 0;
  }
  __device__ static int row_of(const Warp& warp, int v) { return v / 8 * 16 + v % 4 / 2 * 8 + warp.rank() / 4; }
  __device__ static int column_of(const Warp& warp, int v) { return v / 4 % 2 * 8 + warp.rank() % 4 * 2 + v % 2; }

  __device__ void add_product(const Warp& warp, const T* a, const T* b, int stride, int depth) {
    const int row = warp.rank() / 4, pair = warp.rank() % 4 * 2;
    const auto word = [&](const T* base, int i, int k) {
      return *reinterpret_cast<const uint32_t*>(base + (row + i) * stride + pair + k);
    };
#pragma unroll
    for (int k = 0; k < depth; k += 16) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const uint32_t rows[4] = {word(a, 16 * m, k), word(a, 16 * m + 8, k), word(a, 16 * m, k + 8),
                                  word(a, 16 * m + 8, k + 8)};
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const uint32_t columns[2] = {word(b, 8 * n, k), word(b, 8 * n, k + 8)};
          mma_16x8x16<T>(*reinterpret_cast<float (*)[4]>(value + 8 * m + 4 * n), rows, columns);
        }
      }
    }
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
