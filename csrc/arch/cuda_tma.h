// Instructions for TMA (sm_90), NVIDIA's bulk copies. Barriers live in shared memory and count arrived bytes.
#pragma once

#include <cstdint>

namespace moe_a2a::inline MOE_A2A_TARGET {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
__device__ __forceinline__ void barrier_init(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_expect(uint64_t* barrier, uint32_t num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(num_bytes)
               : "memory");
}
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done) {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
  }
}
// Orders this thread's writes to shared memory before reads by TMA or wgmma.
__device__ __forceinline__ void fence_before_async_reads() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void tma_load(void* shared, const void* global, uint32_t num_bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(__cvta_generic_to_global(global)), "r"(num_bytes), "r"(shared_address(barrier))
               : "memory");
}
__device__ __forceinline__ void tma_store(void* global, const void* shared, uint32_t num_bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(global)),
               "r"(shared_address(shared)), "r"(num_bytes)
               : "memory");
}
__device__ __forceinline__ void tma_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until the sources of all but the last kNumLeft groups have been read.
template <int kNumLeft>
__device__ __forceinline__ void tma_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kNumLeft) : "memory");
}
// Waits until at most `num_in_flight` (0 to 2) of the committed groups are incomplete.
__device__ __forceinline__ void tma_wait(int num_in_flight) {
  if (num_in_flight >= 2) {
    asm volatile("cp.async.bulk.wait_group 2;" ::: "memory");
  } else if (num_in_flight == 1) {
    asm volatile("cp.async.bulk.wait_group 1;" ::: "memory");
  } else {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
