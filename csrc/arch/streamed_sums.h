// Sums of rows where a copy engine works for the warp: the rows come into shared memory through a RowReader, piece by
// piece, some pieces ahead, and the sums leave through a PieceSender. This is what a target without such an engine has:
// nothing. Its threads load and store for themselves (add_rows() in rows/row.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "arch/attributes.h"

namespace moe_a2a {

// Bytes of a row that come, and of a sum that leave, at a time.
inline constexpr int kStreamBytes = 2048;

}  // namespace moe_a2a

namespace moe_a2a::inline MOE_A2A_TARGET {

// Every call is made by all lanes of the warp. `memory`: kReaderBytes of the warp's own shared memory.
class NoRowReader {
 public:
  static constexpr bool kIsThere = false;

  MOE_A2A_DEVICE NoRowReader(const Warp&, std::byte* /*memory*/) {}
  // Of each lane in `lanes` its row, `num_bytes` long, starts to come: the first piece of each in ascending order of
  // the lanes, then the second of each. Rows begin at multiples of 16 bytes and are as many long.
  MOE_A2A_DEVICE void begin(const std::byte* /*row*/, uint32_t /*lanes*/, int /*num_bytes*/) {}
  // The next piece, in shared memory, when it is there.
  MOE_A2A_DEVICE const std::byte* next() { return nullptr; }
  // It has been read.
  MOE_A2A_DEVICE void release() {}
};

// The contract of PlainRowSender (row_sender.h), but for rows that the warp forms piece by piece. `memory`:
// kPieceSenderBytes of the warp's own shared memory.
template <class Item, class Target, class Done>
class NoPieceSender {
 public:
  MOE_A2A_DEVICE NoPieceSender(const Warp&, Target, Done, std::byte* /*memory*/) {}
  // Where the next piece is formed.
  MOE_A2A_DEVICE std::byte* open() { return nullptr; }
  // It leaves, to `offset` in the row of `item`. Behind a row's last piece the next row may begin.
  MOE_A2A_DEVICE void send(const Item&, int /*offset*/, int /*num_bytes*/, bool /*is_last*/) {}
  MOE_A2A_DEVICE void finish() {}
};

#if !defined(MOE_A2A_HAS_STREAMED_SUMS)
inline constexpr int kReaderBytes = 0, kPieceSenderBytes = 0;
using RowReader = NoRowReader;
template <class Item, class Target, class Done>
using PieceSender = NoPieceSender<Item, Target, Done>;
#endif

}  // namespace moe_a2a::inline MOE_A2A_TARGET
