// AMD's WarpMatrix: MFMA on gfx90a, gfx942 and gfx950. See block_tile.h.
#pragma once

namespace moe_a2a::inline MOE_A2A_TARGET {

template <class T>
struct WarpMatrix {
  static constexpr int kRows = 32, kColumns = 32, kValues = kRows * kColumns / kWarpSize;
  typedef float Values __attribute__((ext_vector_type(kValues)));
  Values value;

  __device__ void clear() { value = Values{}; }
  __device__ static int row_of(const Warp& warp, int v) { return v / 4 * 8 + warp.rank() / 32 * 4 + v % 4; }
  __device__ static int column_of(const Warp& warp, int) { return warp.rank() % 32; }

  __device__ void add_product(const Warp& warp, const T* a, const T* b, int stride, int depth) {
    const int offset = warp.rank() % 32 * stride + warp.rank() / 32 * 4;
#pragma unroll
    for (int k = 0; k < depth; k += 8) {
      if constexpr (std::is_same_v<T, Bfloat16>) {
        value = __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(four<int16_t>(a + offset + k), four<int16_t>(b + offset + k),
                                                         value, 0, 0, 0);
      } else {
        value = __builtin_amdgcn_mfma_f32_32x32x8f16(four<_Float16>(a + offset + k), four<_Float16>(b + offset + k),
                                                     value, 0, 0, 0);
      }
    }
  }

 private:
  template <class Element>
  using Four = Element __attribute__((ext_vector_type(4)));
  template <class Element>
  __device__ static Four<Element> four(const T* from) {
    return load_shared(reinterpret_cast<const Four<Element>*>(from));
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
