// How many blocks a launch takes when the call does not say: a short table, by the number of tokens. It is measured or
// computed above (moe_a2a/launch_tables.py) and handed over once, so that a call only looks it up. And how they are
// shared out between the halves.
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
  // Raises unless max_tokens ascends and every number is positive.
  explicit LaunchTable(std::vector<LaunchStep> steps);

  // 0: the table is empty, so the target's default. Calls of more tokens than the last step has take the last step.
  int dispatch_blocks(int num_tokens) const { return step(num_tokens).dispatch_blocks; }
  int combine_blocks(int num_tokens) const { return step(num_tokens).combine_blocks; }

 private:
  LaunchStep step(int num_tokens) const;

  std::vector<LaunchStep> steps_;
};

// How many blocks a launch takes when `wanted` are wanted: no more than the device holds at once, one for each compute
// unit. Blocks wait for each other, so one that is not resident would be waited for until the deadline.
int resident_blocks(int wanted, int max_blocks);

// Of so many blocks of a launch that does both halves, two at least, those that send.
int dispatch_senders(int num_blocks);
int combine_senders(int num_blocks, bool presummed, int num_ranks);

}  // namespace moe_a2a
