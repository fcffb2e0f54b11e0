// The instructions of sm_90a for a pipeline of matrix tiles: shared-memory barriers across the blocks of a cluster,
// tiles by TMA, 16-byte copies that arrive at a barrier. Products of a warp group (wgmma) are in
// cuda_warp_group_matrix.h. Shared memory addresses are 32-bit.
#pragma once

#define MOE_A2A_HAS_TILE_PIPELINE 1

#include <cuda.h>

#include "arch/cuda_tma.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// In this compiler pass: code for older, or merely compatible, architectures has no wgmma.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
inline constexpr bool kHasTilePipeline = true;
#else
inline constexpr bool kHasTilePipeline = false;
#endif

using TensorMap = CUtensorMap;

// ---- clusters of blocks

__device__ __forceinline__ int block_in_cluster() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// ---- neighbouring launches on the stream (programmatic dependent launch)

// The next launch may begin where this one has no blocks left, once every block has called it. It waits for this
// one's results by wait_for_last_launch(), which every block calls, so that launches also end in order.
__device__ __forceinline__ void let_next_launch_begin() { asm volatile("griddepcontrol.launch_dependents;"); }
// At once unless this launch was allowed to begin early (launch_pipeline()).
__device__ __forceinline__ void wait_for_last_launch() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- barriers

__device__ __forceinline__ void barrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_end(uint32_t barrier) {  // its memory may be used for anything else
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(num_bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives at the same barrier in another block of the cluster. With .release.cluster, which orders all of the GPU's
// memory, each arrival would be a fence: 1.2 times the kernel's time (H200). Nothing needs that order: the reads are
// complete.
__device__ __forceinline__ void barrier_arrive_at(uint32_t barrier, int block) {
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier),
      "r"(block)
      : "memory");
}
// Arrives once this thread's copies so far have landed.
__device__ __forceinline__ void barrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again%=: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again%=; }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// kThreads of the block's threads, whole warps.
template <int kThreads>
__device__ __forceinline__ void sync_threads() {
  asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}

// ---- shared memory and tiles

struct FloatPair {
  float first, second;
};

__device__ __forceinline__ int load_word(uint32_t from) {
  int value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
  return value;
}
__device__ __forceinline__ float load_float(uint32_t from) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(from) : "memory");
  return value;
}
__device__ __forceinline__ FloatPair load_pair(uint32_t from) {
  FloatPair pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.first), "=f"(pair.second) : "r"(from) : "memory");
  return pair;
}
__device__ __forceinline__ void store_float(uint32_t to, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
}
__device__ __forceinline__ void store_pair(uint32_t to, float first, float second) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(first), "f"(second) : "memory");
}
__device__ __forceinline__ void store_bytes(uint32_t to, uint8_t first, uint8_t second) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(to), "h"(static_cast<uint16_t>(first | second << 8)) : "memory");
}
__device__ __forceinline__ Vec16 load_vector(uint32_t from) {
  Vec16 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}
// Stores a word in a block of the cluster; that block's barrier counts its bytes.
__device__ __forceinline__ void store_word_at(uint32_t address, uint32_t barrier, int block, int value) {
  asm volatile(
      "{ .reg .b32 to, at; mapa.shared::cluster.u32 to, %0, %2; mapa.shared::cluster.u32 at, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [to], %3, [at]; }" ::"r"(address),
      "r"(barrier), "r"(block), "r"(value)
      : "memory");
}
// Stores four 8 x 8 matrices of 16-bit values from registers in the layout of products.
__device__ __forceinline__ void store_matrices(uint32_t to, const uint32_t (&v)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v[0]), "r"(v[1]),
               "r"(v[2]), "r"(v[3])
               : "memory");
}
__device__ __forceinline__ void copy_vector(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_vector_or_zeros(uint32_t to, const void* from, bool is_there) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_there ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_float_or_zero(uint32_t to, const float* from, bool is_there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(is_there ? 4 : 0) : "memory");
}
__device__ __forceinline__ void load_tile(uint32_t to, const TensorMap* map, uint32_t barrier, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1)
      : "memory");
}
__device__ __forceinline__ void load_tile(uint32_t to, const TensorMap* map, uint32_t barrier, int c0, int c1, int c2,
                                          int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
// Into both blocks of the cluster, at the same address.
__device__ __forceinline__ void load_tile_for_both(uint32_t to, const TensorMap* map, uint32_t barrier, int c0, int c1,
                                                   int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(to),
      "l"(map), "r"(barrier), "h"(static_cast<uint16_t>(3)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// ---- registers of warp groups: one group gives some up, another takes them

template <int kCount>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
