// Streamed sums without TMA: one lane copies instead. Only with 32 lanes; with 64 nothing is streamed, as on AMD.
#pragma once

#include <cstring>

#if MOE_A2A_LANES == 32
#define MOE_A2A_HAS_STREAMED_SUMS 1
#endif
#include "arch/streamed_sums.h"

#if MOE_A2A_LANES == 32
namespace moe_a2a::inline MOE_A2A_TARGET {

inline constexpr bool kHasStreams = true;
inline constexpr int kReaderBytes = kStreamBytes, kPieceSenderBytes = kStreamBytes;

class LaneRowReader {
 public:
  LaneRowReader(const Warp& warp, std::byte* memory) : warp_(warp), memory_(memory) {}

  void begin(const std::byte* row, uint32_t lanes, int num_bytes) {
    row_ = row;
    lanes_ = to_read_ = lanes;
    num_bytes_ = num_bytes;
    offset_ = 0;
  }
  const std::byte* next() {
    const auto row = warp_.broadcast(row_, count_trailing_zeros(to_read_));
    const int left = num_bytes_ - offset_;
    if (warp_.rank() == 0) std::memcpy(memory_, row + offset_, left < kStreamBytes ? left : kStreamBytes);
    warp_.sync();
    return memory_;
  }
  void release() {
    warp_.sync();
    to_read_ &= to_read_ - 1;
    if (to_read_ != 0) return;
    to_read_ = lanes_;
    offset_ += kStreamBytes;
  }

 private:
  const Warp& warp_;
  std::byte* memory_;
  const std::byte* row_ = nullptr;
  uint32_t lanes_ = 0, to_read_ = 0;
  int num_bytes_ = 0, offset_ = 0;
};

template <class Item, class Target, class Done>
class LanePieceSender {
 public:
  LanePieceSender(const Warp& warp, Target target, Done done, std::byte* memory)
      : warp_(warp), target_(target), done_(done), memory_(memory) {}

  std::byte* open() {
    warp_.sync();
    return memory_;
  }
  void send(const Item& item, int offset, int num_bytes, bool is_last) {
    warp_.sync();
    if (warp_.rank() != 0) return;
    item.dst_ranks.visit_from(item.first_dst_rank,
                              [&](int rank) { std::memcpy(target_(item, rank) + offset, memory_, num_bytes); });
    if (is_last) done_(item);
  }
  void finish() {}

 private:
  const Warp& warp_;
  Target target_;
  Done done_;
  std::byte* memory_;
};

template <class F>
void with_row_reader(const Warp& warp, std::byte* memory, const F& f) {
  LaneRowReader reader(warp, memory);
  f(reader);
}
template <class Item, class Target, class Done, class F>
void with_piece_sender(const Warp& warp, const Target& target, const Done& done, std::byte* memory, const F& f) {
  LanePieceSender<Item, Target, Done> sender(warp, target, done, memory);
  f(sender);
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
#endif
