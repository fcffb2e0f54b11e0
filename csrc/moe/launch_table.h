// How many blocks a launch takes when the call does not say, and how a fused launch splits them between its halves. The
// table is short and indexed by number of tokens. Python measures or computes it (moe_a2a/tables/launch_tables.py) and
// sets it once, so a call is only a lookup.
#pragma once

#include <vector>

namespace moe_a2a {

// For calls of at most `max_tokens` tokens.
struct LaunchStep {
  int max_tokens = 0;
  int dispatch_blocks = 0;
  int combine_blocks = 0;
};

class LaunchTable {
 public:
  LaunchTable() = default;
  // Throws unless max_tokens ascends and every number is positive.
  explicit LaunchTable(std::vector<LaunchStep> steps);

  // 0: the table is empty; use the target's default. Calls with more tokens than the last step use the last step.
  int dispatch_blocks(int num_tokens) const { return step(num_tokens).dispatch_blocks; }
  int combine_blocks(int num_tokens) const { return step(num_tokens).combine_blocks; }

 private:
  LaunchStep step(int num_tokens) const;

  std::vector<LaunchStep> steps_;
};

// Clamps `wanted` to the blocks that may be resident at once, one per compute unit. Blocks wait for each other, so a
// block that is not resident would stall the others until the deadline.
int resident_blocks(int wanted, int max_blocks);

// How many of a fused launch's `num_blocks`, at least two, send.
int dispatch_senders(int num_blocks);
int combine_senders(int num_blocks, bool presummed, int num_ranks);
int coded_combine_senders(int num_blocks, bool presummed, int num_ranks);
int product_senders(int num_blocks);  // the others multiply

}  // namespace moe_a2a
