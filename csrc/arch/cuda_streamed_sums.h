// Streamed sums by the bulk copy engine of sm_90. What threads load for themselves holds registers and lines of the
// first cache while it flies, and both are too few for the latency of the memory: one of 15 warps of an SM added a row
// of four terms in 43 us that way, in 21 us this way (H200).
#pragma once

#define MOE_A2A_HAS_STREAMED_SUMS 1
#include "arch/cuda_bulk_copy.h"
#include "arch/streamed_sums.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// ---- rows come

inline constexpr int kReadSlots = 5;
inline constexpr int kReaderBytes = 128 + kReadSlots * kStreamBytes;  // the slots' barriers, and the slots

// See NoRowReader. The pieces take the slots in turn.
class BulkRowReader {
 public:
  static constexpr bool kIsThere = true;

  __device__ __forceinline__ BulkRowReader(const Warp& warp, std::byte* memory) : warp_(warp), memory_(memory) {
    if (memory_ != nullptr && warp_.rank() < kReadSlots) barrier_init(barrier(warp_.rank()));
    warp_.sync();
  }

  __device__ __forceinline__ void begin(const std::byte* row, uint32_t lanes, int num_bytes) {
    row_ = row;
    lanes_ = to_load_ = lanes;
    offset_ = 0;
    num_bytes_ = lanes == 0 ? 0 : num_bytes;
    asm volatile("fence.proxy.async.global;" ::: "memory");  // the engine reads what this warp has acquired
    for (int i = 0; i < kReadSlots; ++i) load((slot_ + i) % kReadSlots);
  }

  __device__ __forceinline__ const std::byte* next() {
    barrier_wait(barrier(slot_), parity_);
    return slot_memory(slot_);
  }

  __device__ __forceinline__ void release() {
    warp_.sync();
    load(slot_);
    slot_ = slot_ + 1 < kReadSlots ? slot_ + 1 : 0;
    if (slot_ == 0) parity_ ^= 1;
  }

 private:
  __device__ __forceinline__ uint64_t* barrier(int slot) const { return reinterpret_cast<uint64_t*>(memory_) + slot; }
  __device__ __forceinline__ std::byte* slot_memory(int slot) const { return memory_ + 128 + slot * kStreamBytes; }
  // The piece that is to come next, if there is one.
  __device__ __forceinline__ void load(int slot) {
    if (offset_ >= num_bytes_) return;
    const int lane = count_trailing_zeros(to_load_);
    const auto row = reinterpret_cast<const std::byte*>(warp_.broadcast(reinterpret_cast<uint64_t>(row_), lane));
    if (warp_.rank() == 0) {
      const int left = num_bytes_ - offset_, num_bytes = left < kStreamBytes ? left : kStreamBytes;
      barrier_expect(barrier(slot), static_cast<uint32_t>(num_bytes));
      bulk_load(slot_memory(slot), row + offset_, static_cast<uint32_t>(num_bytes), barrier(slot));
    }
    to_load_ &= to_load_ - 1;
    if (to_load_ == 0) {
      to_load_ = lanes_;
      offset_ += kStreamBytes;
    }
  }

  const Warp& warp_;
  std::byte* memory_;
  const std::byte* row_ = nullptr;  // this lane's
  uint32_t lanes_ = 0;              // whose rows come
  uint32_t to_load_ = 0;            // those of them whose piece at offset_ is still to be loaded
  int offset_ = 0, num_bytes_ = 0;  // of the rows
  int slot_ = 0;                    // of the piece that is read next
  uint32_t parity_ = 0;             // of its barrier
};

// ---- sums leave

inline constexpr int kPieceStages = 2;
inline constexpr int kPieceSenderBytes = kPieceStages * kStreamBytes;

// See NoPieceSender. A row is complete when the first piece of the next one has left: until then its own fly.
template <class Item, class Target, class Done>
class BulkPieceSender {
 public:
  __device__ __forceinline__ BulkPieceSender(const Warp& warp, Target target, Done done, std::byte* memory)
      : warp_(warp), target_(target), done_(done), memory_(memory) {}

  __device__ __forceinline__ std::byte* open() {
    if (warp_.rank() == 0) bulk_wait_read<kPieceStages - 1>();  // the piece that was there has been read
    warp_.sync();
    return memory_ + stage_ * kStreamBytes;
  }

  __device__ __forceinline__ void send(const Item& item, int offset, int num_bytes, bool is_last) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the copy engine reads what this thread has written
    warp_.sync();
    if (warp_.rank() == 0) {
      const std::byte* piece = memory_ + stage_ * kStreamBytes;
      const uint32_t lines = static_cast<uint32_t>((num_bytes + 127) / 128 * 128);  // whole ones, see BulkRowSender
      item.members.visit_from(item.turn, [&](int rank) { bulk_store(target_(item, rank) + offset, piece, lines); });
      bulk_commit();
      if (is_ended_) {
        bulk_wait(1);
        done_(ended_);
      }
      if (is_last) ended_ = item;
      is_ended_ = is_last;
    }
    stage_ = (stage_ + 1) % kPieceStages;
  }

  __device__ __forceinline__ void finish() {
    if (warp_.rank() != 0 || !is_ended_) return;
    bulk_wait(0);
    done_(ended_);
  }

 private:
  const Warp& warp_;
  Target target_;
  Done done_;
  std::byte* memory_;
  int stage_ = 0;
  bool is_ended_ = false;  // the piece before was the last of `ended_`
  Item ended_{};
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
using RowReader = NoRowReader;
template <class Item, class Target, class Done>
using PieceSender = NoPieceSender<Item, Target, Done>;
#else
using RowReader = BulkRowReader;
template <class Item, class Target, class Done>
using PieceSender = BulkPieceSender<Item, Target, Done>;
#endif

}  // namespace moe_a2a::inline MOE_A2A_TARGET
