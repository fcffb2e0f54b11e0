// The credit that ends a rank's use of a buffer.
#pragma once

#include "moe/args.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// Tells every rank, including those that sent nothing, that its part of this buffer is no longer read here. Pairs with
// the acquire in DispatchSend::await_credit(). Sums need no credit: a rank sends the table of its next dispatch on
// this buffer (a small batch: its announcement; a medium one: the row) after its combine_recv, and its sums are
// overwritten only once that has arrived.
MOE_A2A_DEVICE void return_credit(const Context& c, int buffer, uint64_t epoch, const CreditNote& note) {
  signal_many(c.heap, RankSet::all(c.heap.num_ranks), c.region.dispatch_credit.at(buffer, c.heap.rank), epoch,
              note.payload());
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
