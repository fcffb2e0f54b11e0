// The product that a block computes at a time, and of what each target makes it:
//
//   BlockTile<T>      T is Half or Bfloat16; sums are fp32
//     kRows, kColumns, kSharedBytes
//     multiply(block, shared, num_rows, depth, row_of_a, row_of_b, store)
//                     row_of_a(i), row_of_b(half, j): where row i < kRows of A and row j < kColumns of either half of B
//                     begin, at a multiple of 16 bytes; null: zeros. depth: their length, a multiple of 16.
//                     store(i, j, first, second) is called once for each i < num_rows (and maybe beyond) and j, with
//                     the products of row i of A and row j of both halves of B. Two halves, so that an activation finds
//                     gate and up in one place.
//   WarpMatrix<T>     of a GPU target: kRows x kColumns sums of a warp in its registers, value[kValues] of each lane
//     add_product(warp, a, b, stride, depth)   rows of A and B in shared memory, `stride` elements apart
//     row_of(warp, v), column_of(warp, v)      where value v of the lane belongs
//
// The CPU has BlockTile in cpu_block_tile.h; GPUs build it from their WarpMatrix (simt_block_tile.h): mma.sync in
// cuda_warp_matrix.h, MFMA in hip_warp_matrix.h, and for lanes over fibers the one below.
#pragma once

namespace moe_a2a::inline MOE_A2A_TARGET {

// In plain C++, any number of lanes.
template <class T>
struct PlainWarpMatrix {
  static constexpr int kRows = 32, kColumns = 16, kValues = kRows * kColumns / kWarpSize;
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
