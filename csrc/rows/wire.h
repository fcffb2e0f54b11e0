// What the two wires have in common. A wire is a way for rows to travel between ranks:
//
//   RowWire   whole rows by bulk copies, one signal per row behind a fence that the rows of a block share
//   LlWire    pieces of rows as LL words
//
// Both have the same interface: send(schedule, source) at the sender, receive() at the receiver.
//
//   schedule  in which order and where to: num_rows() and at(warp, i), a Scheduled; kIsToOneRank: each row has one
//             destination
//   source    what a row is made of: send(group, sender, scheduled, piece) has a group send a piece of it through a
//             sender of the wire; kKind is its trace slice. For RowWire also with_row_sender(port, f), which calls
//             f(sender), and payload(delivery), if a row's signal carries one
#pragma once

#include "comm/array.h"
#include "comm/divisor.h"
#include "comm/wait.h"
#include "rows/row_layout.h"

namespace moe_a2a {

// A row in flight.
struct Delivery {
  RankSet dst_ranks;
  int token;
  int first_dst_rank;  // written first; if all ranks began with the same one, its link would be the bottleneck
};

// The i-th row of a schedule. `row` is its number at the source: a token, or a row of recv_x.
struct Scheduled {
  Delivery delivery;
  int row;
};

// One step's exchange of rows: the slots that they go to, and the epoch of their signals and words.
struct Exchange {
  const HeapView& heap;
  const WaitPolicy& wait;
  const Array<Signal, 3>& signals;      // [B, R src, T]
  const Array<std::byte, 4>& rows;      // [B, R src, T, row stride]
  const Array<std::byte, 4>& ll_words;  // [B, R src, L, LL row stride]
  const Divisor& by_pieces;             // pieces of a row
  int buffer;
  uint64_t epoch;

  MOE_A2A_HOST_DEVICE const TraceBuffer& trace() const { return wait.trace; }
};

// How many of `num_warps` warps can have `bytes_per_warp` each of `num_bytes` of shared memory.
MOE_A2A_HOST_DEVICE constexpr int warps_with_stage(int bytes_per_warp, int num_bytes, int num_warps) {
  return bytes_per_warp <= num_bytes / num_warps ? num_warps : num_bytes / bytes_per_warp;
}

}  // namespace moe_a2a
