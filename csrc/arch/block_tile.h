// The product that a block computes at a time, and what each target builds it from:
//
//   BlockTile<T>      T is Half, Bfloat16 or Float8; sums are fp32
//     kRows, kColumns (128 for Float8), kSharedBytes
//     multiply(block, shared, num_rows, depth, row_of_a, row_of_b, store, scales)
//                     row_of_a(i), row_of_b(half, j): the start of row i < kRows of A, or of row j < kColumns of a half
//                     of B, 16-byte aligned; null: zeros. depth: their length, a multiple of 16.
//                     store(i, j, first, second) is called once for each i < num_rows (and possibly beyond) and j, with
//                     the products of row i of A and row j of both halves of B. Two halves, so that an activation gets
//                     gate and up together. From its first call until the next product, store() may use `shared`, up to
//                     kRows * kColumns floats.
//                     For Float8, products are scaled for every kScaleDepth of depth: scales.of_row(i) and
//                     scales.of_columns(half) point to the first of these, null: zeros.
//   WarpMatrix<T>     on GPU targets: kRows x kColumns sums of a warp in its registers, value[kValues] per lane
//     add_product(warp, a, b, stride, depth)   rows of A and B in shared memory, `stride` elements apart
//     row_of(warp, v), column_of(warp, v)      the place of the lane's value v
//
// The CPU's BlockTile is in cpu_block_tile.h. GPUs build theirs from WarpMatrix (simt_block_tile.h): mma.sync in
// cuda_warp_matrix.h, MFMA in hip_warp_matrix.h, and the one below for the test target whose lanes are fibers.
#pragma once

namespace moe_a2a::inline MOE_A2A_TARGET {

inline constexpr int kScaleDepth = 128;
struct NoScales {};

// Plain C++, for any number of lanes.
template <class T>
struct PlainWarpMatrix {
  static constexpr int kRows = 32, kColumns = 32, kValues = kRows * kColumns / kWarpSize;
  float value[kValues];

  MOE_A2A_DEVICE void clear() {
    for (float& v : value) v = 0;
  }
  MOE_A2A_DEVICE static int row_of(const Warp& warp, int v) { return (v * kWarpSize + warp.rank()) / kColumns; }
  MOE_A2A_DEVICE static int column_of(const Warp& warp, int v) { return (v * kWarpSize + warp.rank()) % kColumns; }
  MOE_A2A_DEVICE void add_product(const Warp& warp, const T* a, const T* b, int stride, int depth) {
    for (int v = 0; v < kValues; ++v) {
      const T *row = a + row_of(warp, v) * stride, *column = b + column_of(warp, v) * stride;
      for (int k = 0; k < depth; ++k) value[v] += to_float(row[k]) * to_float(column[k]);
    }
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
