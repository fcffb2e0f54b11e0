// The landed rows whose sums a rank sends back, on one line: the order in which they go.
#pragma once

#include "moe/combine/own_sums.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

class LandedLine {
 public:
  // Without the rows of this rank's own tokens, where their sums are kept. What all warps of a small batch ask for is
  // read here, together.
  MOE_A2A_DEVICE LandedLine(const Context& c, int buffer, const OwnSums& own)
      : context_(c),
        own_(own),
        offsets_(c.ws.landed_offsets.at(buffer)),
        begin_own_(offsets_[c.heap.rank]),
        end_own_(offsets_[c.heap.rank + 1]),
        num_landed_(offsets_[c.heap.num_ranks]) {}

  MOE_A2A_DEVICE int size() const { return num_landed_ - (own_.are_kept() ? end_own_ - begin_own_ : 0); }

  // The i-th, the owners in turn, beginning behind this rank, as long as they have rows left. So no rank is sent to by
  // all at once, and each gets its rows in the order in which it waits for them.
  MOE_A2A_DEVICE int in_turn(int i) const {
    const int num_ranks = context_.heap.num_ranks;
    for (int done = 0;;) {
      int num_left = 0, fewest = 0;  // owners with more rows than `done`, and the rows of the first of them to end
      for (int r = 0; r < num_ranks; ++r) {
        if (num_rows(r) <= done) continue;
        fewest = num_left == 0 || num_rows(r) < fewest ? num_rows(r) : fewest;
        ++num_left;
      }
      if (i < (fewest - done) * num_left) {
        int rank = context_.heap.rank;
        for (int skip = i % num_left; skip >= 0; skip -= num_rows(rank) > done) rank = (rank + 1) % num_ranks;
        return offsets_[rank] + done + i / num_left;
      }
      i -= (fewest - done) * num_left;
      done = fewest;
    }
  }

  // The i-th as they lie in memory, beginning behind the rows of this rank, which come last.
  MOE_A2A_DEVICE int behind_own(int i) const {
    const int landed = end_own_ + i;
    return landed < num_landed_ ? landed : landed - num_landed_;
  }

 private:
  MOE_A2A_DEVICE int num_rows(int rank) const { return own_.keep(rank) ? 0 : offsets_[rank + 1] - offsets_[rank]; }

  const Context& context_;
  // Not a copy: with that the compiler no longer unrolls in_turn(), and an SM of H200 sends 25 KB/us instead of 33.
  const OwnSums& own_;
  const int32_t* offsets_;  // [num_ranks + 1]
  int begin_own_, end_own_, num_landed_;
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
