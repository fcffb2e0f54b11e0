// Rows by the bulk copy engine of sm_90: one lane of a warp has a row brought into shared memory and from there written
// to every rank, while the SM does nothing else for it. Two stages a warp: the stores of one row fly while the next
// comes in.
#pragma once

#define MOE_A2A_HAS_WARP_SENDER 1
#include "target/row_sender.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// ---- the instructions

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
__device__ __forceinline__ void bulk_load(void* shared, const void* global, uint32_t num_bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(__cvta_generic_to_global(global)), "r"(num_bytes), "r"(shared_address(barrier))
               : "memory");
}
__device__ __forceinline__ void bulk_store(void* global, const void* shared, uint32_t num_bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(global)),
               "r"(shared_address(shared)), "r"(num_bytes)
               : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int kInFlight>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kInFlight) : "memory");
}

// ---- the sender

inline constexpr int kStages = 2;
inline constexpr int kStageHeader = 128;  // holds the stage's barrier
__host__ __device__ constexpr int64_t stage_bytes(int64_t row_bytes) {
  return kStageHeader + (row_bytes + 127) / 128 * 128;
}
// Shared memory that a warp's sender takes, whether or not rows are put together in it.
__host__ __device__ constexpr int64_t warp_staging_bytes(int64_t row_bytes, bool /*staged*/) {
  return kStages * stage_bytes(row_bytes);
}

// Same contract as PlainRowSender, for a warp. `staging`: shared memory, warp_staging_bytes() of it.
template <class Item, class Target, class Done>
class BulkRowSender {
 public:
  __device__ __forceinline__ BulkRowSender(const Warp& warp, Target target, Done done, std::byte* staging,
                                           int64_t row_bytes)
      : warp_(warp), target_(target), done_(done), staging_(staging), stage_stride_(stage_bytes(row_bytes)) {
    if (warp_.rank() == 0 && staging_ != nullptr) {
      for (int s = 0; s < kStages; ++s) barrier_init(barrier(s));
    }
    warp_.sync();
  }

  // A row whose parts are not multiples of 16 bytes, or that has no staging, goes by plain stores.
  __device__ __forceinline__ void send(const RowSource& row, const Item& item) {
    const uint64_t misalignment = reinterpret_cast<uint64_t>(row.values) | static_cast<uint64_t>(row.num_value_bytes) |
                                  reinterpret_cast<uint64_t>(row.scales) | static_cast<uint64_t>(row.num_scale_bytes);
    if (staging_ == nullptr || misalignment % 16 != 0) {
      PlainRowSender<Warp, Item, Target, Done>(warp_, target_, done_, nullptr).send(row, item);
      return;
    }
    std::byte* stage = open_stage();
    if (warp_.rank() == 0) {
      uint64_t* loaded = barrier(stage_);
      barrier_expect(loaded, static_cast<uint32_t>(row.num_value_bytes + row.num_scale_bytes));
      bulk_load(stage, row.values, static_cast<uint32_t>(row.num_value_bytes), loaded);
      if (row.num_scale_bytes > 0) {
        bulk_load(stage + row.scales_offset, row.scales, static_cast<uint32_t>(row.num_scale_bytes), loaded);
      }
      barrier_wait(loaded, parity_ >> stage_ & 1);
    }
    parity_ ^= 1u << stage_;
    const int64_t end = row.num_scale_bytes > 0 ? row.scales_offset + row.num_scale_bytes : row.num_value_bytes;
    store_stage(stage, end, item);
  }

  // Where the caller may write the next row itself; then send_staged().
  __device__ __forceinline__ std::byte* open_stage() {
    if (num_sent_ >=
        kStages) {  // the row that had this stage: its stores are done when at most one later row's are not
      if (warp_.rank() == 0) bulk_wait<kStages - 1>();
      complete(stage_);
    }
    return stage_memory(stage_);
  }

  __device__ __forceinline__ void send_staged(int64_t num_bytes, const Item& item) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the copy engine reads what this thread has written
    warp_.sync();
    store_stage(stage_memory(stage_), num_bytes, item);
  }

  __device__ __forceinline__ void finish() {
    if (warp_.rank() == 0) bulk_wait<0>();
    const int pending = num_sent_ < kStages ? num_sent_ : kStages;
    for (int i = pending; i > 0; --i) complete((stage_ + kStages - i) % kStages);
    num_sent_ = 0;
  }

 private:
  __device__ __forceinline__ uint64_t* barrier(int stage) const {
    return reinterpret_cast<uint64_t*>(staging_ + stage * stage_stride_);
  }
  __device__ __forceinline__ std::byte* stage_memory(int stage) const {
    return staging_ + stage * stage_stride_ + kStageHeader;
  }

  __device__ __forceinline__ void store_stage(const std::byte* stage, int64_t num_bytes, const Item& item) {
    if (warp_.rank() == 0) {
      // Pieces of 16 bytes: what lies behind the row, here and at its landing place, belongs to its 128-byte line.
      const auto whole_pieces = static_cast<uint32_t>((num_bytes + 15) / 16 * 16);
      for (auto rest = item.members; !rest.empty(); rest.remove_first()) {
        bulk_store(target_(item, rest.first()), stage, whole_pieces);
      }
      bulk_commit();
    }
    if (stage_ == 0) {
      item0_ = item;
    } else {
      item1_ = item;
    }
    stage_ = (stage_ + 1) % kStages;
    ++num_sent_;
  }

  __device__ __forceinline__ void complete(int stage) {
    warp_.sync();
    done_(stage == 0 ? item0_ : item1_);
  }

  const Warp& warp_;
  Target target_;
  Done done_;
  std::byte* staging_;
  int64_t stage_stride_;
  int stage_ = 0;        // the next row's
  uint32_t parity_ = 0;  // of each stage's barrier
  int num_sent_ = 0;
  Item item0_{}, item1_{};  // what is in flight in each stage (two names: an array would live in local memory)
};

// The warp's sender of this target: by bulk copies from sm_90 on.
template <class Item, class Target, class Done>
__device__ auto make_warp_sender(const Warp& warp, Target target, Done done, std::byte* staging, int64_t row_bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  return PlainRowSender<Warp, Item, Target, Done>(warp, target, done, staging);
#else
  return BulkRowSender<Item, Target, Done>(warp, target, done, staging, row_bytes);
#endif
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
