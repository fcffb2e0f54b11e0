// Sums of rows where TMA moves the data: a RowReader brings the rows into shared memory piece by piece, several pieces
// ahead, and a PieceSender takes the sums away. This file is the fallback for targets without TMA, whose threads load
// and store for themselves (add_rows() in rows/row_sum.h).
#pragma once

#include <cstddef>

#include "arch/attributes.h"

namespace moe_a2a {

// Bytes per piece: of a row that arrives, of a sum that leaves.
inline constexpr int kStreamBytes = 2048;

}  // namespace moe_a2a

#if !defined(MOE_A2A_HAS_STREAMED_SUMS)
namespace moe_a2a::inline MOE_A2A_TARGET {

inline constexpr bool kHasStreams = false;
inline constexpr int kReaderBytes = 0, kPieceSenderBytes = 0;  // shared memory per warp

// Where there are streams, these call f(reader) and f(sender); all lanes of the warp make every call to them.
//
// A reader has
//   begin(row, lanes, num_bytes)  starts to fetch each lane's row, for the lanes in `lanes`: the first piece of each in
//                                 ascending order of lanes, then the second of each. Rows are 16-byte aligned,
//                                 num_bytes a multiple of 16.
//   next()                        the next piece, in shared memory, once it has arrived
//   release()                     the piece has been read
// A sender has the contract of PlainRowSender (row_sender.h), but for rows that the warp forms piece by piece:
//   open()                        where to form the next piece
//   send(item, offset, num_bytes, is_last)  sends it to `offset` in the row's slot; after a row's last piece the next
//                                 row may begin
//   finish()
template <class F>
MOE_A2A_DEVICE void with_row_reader(const Warp&, std::byte* /*memory*/, const F&) {}
template <class Item, class Target, class Done, class F>
MOE_A2A_DEVICE void with_piece_sender(const Warp&, const Target&, const Done&, std::byte* /*memory*/, const F&) {}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
#endif
