// Sums of rows where TMA moves the data: a RowReader brings the rows into shared memory piece by piece, some pieces
// ahead, and a PieceSender takes the sums away. Here: what a target without TMA says of them. Its threads load and
// store for themselves (add_rows() in rows/row_sum.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "arch/attributes.h"

namespace moe_a2a {

// Bytes of a row that arrive, and of a sum that leave, at a time.
inline constexpr int kStreamBytes = 2048;

}  // namespace moe_a2a

#if !defined(MOE_A2A_HAS_STREAMED_SUMS)
namespace moe_a2a::inline MOE_A2A_TARGET {

inline constexpr bool kHasStreams = false;
inline constexpr int kReaderBytes = 0, kPieceSenderBytes = 0;  // of a warp's shared memory

// Where there are streams, calls f(reader) and f(sender); every call to them is made by all lanes of the warp.
//
// A reader has
//   begin(row, lanes, num_bytes)  starts to fetch each lane's row, of the lanes in `lanes`: the first piece of each in
//                                 ascending order of the lanes, then the second of each. Rows begin at multiples of 16
//                                 bytes and have as many.
//   next()                        the next piece, in shared memory, once it has arrived
//   release()                     it has been read
// A sender has the contract of PlainRowSender (row_sender.h), but for rows that the warp forms piece by piece:
//   open()                        where the next piece is formed
//   send(item, offset, num_bytes, is_last)  sends it to `offset` in the row's slot; after a row's last piece the next
//                                 row may begin
//   finish()
template <class F>
MOE_A2A_DEVICE void with_row_reader(const Warp&, std::byte* /*memory*/, const F&) {}
template <class Item, class Target, class Done, class F>
MOE_A2A_DEVICE void with_piece_sender(const Warp&, const Target&, const Done&, std::byte* /*memory*/, const F&) {}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
#endif
