// Rows by TMA (sm_90): one lane of a warp has a row copied into shared memory and from there to every rank, at no cost
// to the SM's threads. With two stages per warp, the stores of one row overlap the load of the next.
#pragma once

#define MOE_A2A_HAS_WARP_SENDER 1
#include "arch/cuda_tma.h"
#include "arch/row_sender.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

inline constexpr int kRowStages = 2;
// A row that a warp forms leaves in parts of at least this size while it forms the rest: the link does not wait for the
// 8 us that a warp takes to quantise 7168 values.
inline constexpr int kEarlyBytes = 2048;
inline constexpr int kStageHeader = 128;  // the stage's barrier and a description of its row
__host__ __device__ constexpr int64_t stage_bytes(int64_t row_bytes) {
  return kStageHeader + (row_bytes + 127) / 128 * 128;
}
// Shared memory for one warp's sender.
__host__ __device__ constexpr int64_t warp_staging_bytes(int64_t row_bytes, StagedFor what) {
  return what == StagedFor::kSumming || what == StagedFor::kStoring ? 0 : kRowStages * stage_bytes(row_bytes);
}

// What fills the links: this many bytes of rows being stored by all sending warps together, if these are spread over
// this many SMs or more (an SM sends 35 KB/us). With three times as many, all rows of a batch arrive at its end, and
// the receivers add them only then (2 H200, presummed combine: 512 tokens 45 us instead of 42, 1024 tokens 67 instead
// of 62). With three quarters as many, the links idle (dispatch of 4096 tokens: 209 us instead of 182).
inline constexpr int kRowBytesInFlight = 600 << 10, kBlocksToFillLinks = 20;

// How many of a block's `most` sending warps take part if they only start bulk copies of rows.
__host__ __device__ constexpr int num_copying_warps(int num_blocks, int row_bytes, int most) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  return most;  // plain stores
#else
  const int enough = num_blocks < kBlocksToFillLinks ? most : senders_for(kRowBytesInFlight, num_blocks * row_bytes);
  return enough < most ? enough : most;
#endif
}

// PlainRowSender's contract, for a warp; one lane does all the work. `staging`: warp_staging_bytes() of shared memory;
// null: rows go by plain stores.
template <class Item, class Target, class Done>
class TmaRowSender {
 public:
  __device__ __forceinline__ TmaRowSender(const Warp& warp, Target target, Done done, std::byte* staging,
                                          int64_t row_bytes)
      : warp_(warp), target_(target), done_(done), staging_(staging), stage_stride_(stage_bytes(row_bytes)) {
    if (warp_.rank() == 0 && staging_ != nullptr) {
      for (int s = 0; s < kRowStages; ++s) barrier_init(header(s)->loaded);
    }
    warp_.sync();
  }

  // A row goes by plain stores if a part is not a multiple of 16 bytes, or without staging.
  __device__ __forceinline__ void send(const RowSource& row, const Item& item) {
    const uint64_t misalignment = reinterpret_cast<uint64_t>(row.values) | static_cast<uint64_t>(row.num_value_bytes) |
                                  reinterpret_cast<uint64_t>(row.scales) | static_cast<uint64_t>(row.num_scale_bytes);
    if (staging_ == nullptr || misalignment % 16 != 0) {
      PlainRowSender<Warp, Item, Target, Done>(warp_, target_, done_, nullptr).send(row, item);
      return;
    }
    if (warp_.rank() != 0) return;
    const int stage =
        (stage_ + (is_loading_ ? 1 : 0)) % kRowStages;  // free: the previous send() completed the oldest row
    load(stage, row);
    put_in_stage(stage, row, item);
    store_loaded();  // the previous row: its stores overlap this one's load
    is_loading_ = true;
    if (num_in_flight_ == kRowStages - 1) complete_oldest();  // for the next row
  }

  __device__ __forceinline__ std::byte* open_stage(const Item&) {
    if (warp_.rank() == 0 && num_in_flight_ == kRowStages) complete_oldest();
    warp_.sync();
    return stage_memory(stage_);
  }

  // The first `num_bytes` of the open stage are complete: sends them while the warp forms the rest, once they are worth
  // a copy.
  __device__ __forceinline__ void send_early(const Item& item, int num_bytes) {
    if (num_bytes - num_sent_ < kEarlyBytes) return;
    fence_before_async_reads();
    warp_.sync();
    if (warp_.rank() == 0) store_part(item, num_sent_, num_bytes - num_sent_);
    num_sent_ = num_bytes;
  }

  __device__ __forceinline__ void send_staged(const RowSource& row, const Item& item) {
    fence_before_async_reads();
    warp_.sync();
    if (warp_.rank() == 0) {
      put_in_stage(stage_, row, item);
      store_stage();
    }
    num_sent_ = 0;
    stage_ = (stage_ + 1) % kRowStages;
  }

  __device__ __forceinline__ void finish() {
    if (warp_.rank() != 0) return;
    store_loaded();
    while (num_in_flight_ > 0) complete_oldest();
  }

 private:
  struct Header {
    uint64_t loaded[1];  // the barrier of the stage's load
    uint32_t num_bytes;  // of the row
    Item item;
  };
  static_assert(sizeof(Header) <= kStageHeader);

  __device__ __forceinline__ Header* header(int stage) const {
    return reinterpret_cast<Header*>(staging_ + stage * stage_stride_);
  }
  __device__ __forceinline__ std::byte* stage_memory(int stage) const {
    return staging_ + stage * stage_stride_ + kStageHeader;
  }

  // Rows in flight are in the stages before stage_, oldest first.
  __device__ __forceinline__ void complete_oldest() {
    tma_wait(num_in_flight_ - 1);
    const int oldest = (stage_ + kRowStages - num_in_flight_) % kRowStages;
    --num_in_flight_;
    done_(header(oldest)->item);
  }

  __device__ __forceinline__ void load(int stage, const RowSource& row) {
    uint64_t* loaded = header(stage)->loaded;
    std::byte* memory = stage_memory(stage);
    barrier_expect(loaded, static_cast<uint32_t>(row.num_value_bytes + row.num_scale_bytes));
    tma_load(memory, row.values, static_cast<uint32_t>(row.num_value_bytes), loaded);
    if (row.num_scale_bytes > 0) {
      tma_load(memory + row.scales_offset, row.scales, static_cast<uint32_t>(row.num_scale_bytes), loaded);
    }
  }

  // Rows are sent as whole lines: the rest of the last 128-byte line is unused, here and in the slot.
  __device__ __forceinline__ void put_in_stage(int stage, const RowSource& row, const Item& item) {
    const int64_t end = row.num_scale_bytes > 0 ? row.scales_offset + row.num_scale_bytes : row.num_value_bytes;
    header(stage)->num_bytes = static_cast<uint32_t>((end + 127) / 128 * 128);
    header(stage)->item = item;
  }

  __device__ __forceinline__ void store_loaded() {
    if (!is_loading_) return;
    barrier_wait(header(stage_)->loaded, parity_ >> stage_ & 1);
    parity_ ^= 1u << stage_;
    is_loading_ = false;
    store_stage();
    stage_ = (stage_ + 1) % kRowStages;
  }

  __device__ __forceinline__ void store_stage() {
    store_part(header(stage_)->item, num_sent_, static_cast<int>(header(stage_)->num_bytes) - num_sent_);
    tma_commit();
    ++num_in_flight_;
  }

  // Part of the row in the current stage.
  __device__ __forceinline__ void store_part(const Item& item, int first, int num_bytes) {
    const std::byte* part = stage_memory(stage_) + first;
    item.dst_ranks.visit_from(item.first_dst_rank, [&](int rank) {
      tma_store(target_(item, rank) + first, part, static_cast<uint32_t>(num_bytes));
    });
  }

  const Warp& warp_;
  Target target_;
  Done done_;
  std::byte* staging_;
  int64_t stage_stride_;
  int stage_ = 0;            // of the next row, or of the row being loaded
  int num_in_flight_ = 0;    // rows being stored, in the stages before stage_
  int num_sent_ = 0;         // bytes of the row in stage_ that are being stored already
  bool is_loading_ = false;  // the row in stage_ is being loaded
  uint32_t parity_ = 0;      // one bit per stage's barrier
};

// TMA needs sm_90.
template <class Item, class Target, class Done>
__device__ auto make_warp_sender(const Warp& warp, Target target, Done done, std::byte* staging, int64_t row_bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  return PlainRowSender<Warp, Item, Target, Done>(warp, target, done, staging);
#else
  return TmaRowSender<Item, Target, Done>(warp, target, done, staging, row_bytes);
#endif
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
