// Streamed sums by TMA (sm_90). Per-thread loads tie up registers and L1 lines while in flight, too few of either to
// cover memory latency: with 15 warps per SM, a warp took 43 us to add a row of four terms that way, and takes 21 us
// this way (H200).
#pragma once

#define MOE_A2A_HAS_STREAMED_SUMS 1
#include "arch/cuda_tma.h"
#include "arch/streamed_sums.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr bool kHasStreams = false;
#else
inline constexpr bool kHasStreams = true;
#endif

// ---- rows in

inline constexpr int kReadStages = 5;
inline constexpr int kReaderBytes = 128 + kReadStages * kStreamBytes;  // the stages' barriers, and the stages

// See streamed_sums.h. Pieces use the stages round-robin.
class TmaRowReader {
 public:
  __device__ __forceinline__ TmaRowReader(const Warp& warp, std::byte* memory) : warp_(warp), memory_(memory) {
    if (memory_ != nullptr && warp_.rank() < kReadStages) barrier_init(barrier(warp_.rank()));
    warp_.sync();
  }

  __device__ __forceinline__ void begin(const std::byte* row, uint32_t lanes, int num_bytes) {
    row_ = row;
    lanes_ = to_load_ = lanes;
    offset_ = 0;
    num_bytes_ = lanes == 0 ? 0 : num_bytes;
    asm volatile("fence.proxy.async.global;" ::: "memory");  // TMA reads what this warp has acquired
    for (int i = 0; i < kReadStages; ++i) load((stage_ + i) % kReadStages);
  }

  __device__ __forceinline__ const std::byte* next() {
    barrier_wait(barrier(stage_), parity_);
    return stage_memory(stage_);
  }

  __device__ __forceinline__ void release() {
    warp_.sync();
    load(stage_);
    stage_ = stage_ + 1 < kReadStages ? stage_ + 1 : 0;
    if (stage_ == 0) parity_ ^= 1;
  }

 private:
  __device__ __forceinline__ uint64_t* barrier(int stage) const { return reinterpret_cast<uint64_t*>(memory_) + stage; }
  __device__ __forceinline__ std::byte* stage_memory(int stage) const { return memory_ + 128 + stage * kStreamBytes; }
  // Fetches the next piece, if any.
  __device__ __forceinline__ void load(int stage) {
    if (offset_ >= num_bytes_) return;
    const int lane = count_trailing_zeros(to_load_);
    const auto row = reinterpret_cast<const std::byte*>(warp_.broadcast(reinterpret_cast<uint64_t>(row_), lane));
    if (warp_.rank() == 0) {
      const int left = num_bytes_ - offset_, num_bytes = left < kStreamBytes ? left : kStreamBytes;
      barrier_expect(barrier(stage), static_cast<uint32_t>(num_bytes));
      tma_load(stage_memory(stage), row + offset_, static_cast<uint32_t>(num_bytes), barrier(stage));
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
  uint32_t lanes_ = 0;              // whose rows are read
  uint32_t to_load_ = 0;            // lanes whose piece at offset_ has not been fetched
  int offset_ = 0, num_bytes_ = 0;  // within the rows
  int stage_ = 0;                   // of the piece to read next
  uint32_t parity_ = 0;             // of its barrier
};

// ---- sums out

inline constexpr int kPieceStages = 2;
inline constexpr int kPieceSenderBytes = kPieceStages * kStreamBytes;

// See streamed_sums.h. Waits for a row's completion only after sending the first piece of the next.
template <class Item, class Target, class Done>
class TmaPieceSender {
 public:
  __device__ __forceinline__ TmaPieceSender(const Warp& warp, Target target, Done done, std::byte* memory)
      : warp_(warp), target_(target), done_(done), memory_(memory) {}

  __device__ __forceinline__ std::byte* open() {
    if (warp_.rank() == 0) tma_wait_read<kPieceStages - 1>();  // TMA has read the piece that was there
    warp_.sync();
    return memory_ + stage_ * kStreamBytes;
  }

  __device__ __forceinline__ void send(const Item& item, int offset, int num_bytes, bool is_last) {
    fence_before_async_reads();
    warp_.sync();
    if (warp_.rank() == 0) {
      const std::byte* piece = memory_ + stage_ * kStreamBytes;
      const uint32_t lines = static_cast<uint32_t>((num_bytes + 127) / 128 * 128);  // whole lines, see TmaRowSender
      item.dst_ranks.visit_from(item.first_dst_rank,
                                [&](int rank) { tma_store(target_(item, rank) + offset, piece, lines); });
      tma_commit();
      if (has_ended_) {
        tma_wait(1);
        done_(ended_);
      }
      if (is_last) ended_ = item;
      has_ended_ = is_last;
    }
    stage_ = (stage_ + 1) % kPieceStages;
  }

  __device__ __forceinline__ void finish() {
    if (warp_.rank() != 0 || !has_ended_) return;
    tma_wait(0);
    done_(ended_);
  }

 private:
  const Warp& warp_;
  Target target_;
  Done done_;
  std::byte* memory_;
  int stage_ = 0;
  bool has_ended_ = false;  // the previous piece was the last of `ended_`
  Item ended_{};
};

template <class F>
__device__ void with_row_reader(const Warp& warp, std::byte* memory, const F& f) {
  if constexpr (kHasStreams) {
    TmaRowReader reader(warp, memory);
    f(reader);
  }
}
template <class Item, class Target, class Done, class F>
__device__ void with_piece_sender(const Warp& warp, const Target& target, const Done& done, std::byte* memory,
                                  const F& f) {
  if constexpr (kHasStreams) {
    TmaPieceSender<Item, Target, Done> sender(warp, target, done, memory);
    f(sender);
  }
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
