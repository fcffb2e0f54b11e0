// A launch as a pipeline: each block passes its chunks through stages and sends ahead of what it waits for.
#pragma once

#include "collectives/meeting.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// How many chunks a block sends ahead of the one that it waits for: one keeps the link busy while others are reduced.
// All, where waiting is expensive.
MOE_A2A_DEVICE int chunks_ahead(int num_chunks, const Grid& grid) {
  return kRanksShareCores ? (num_chunks + grid.size() - 1) / grid.size() : 1;
}

// A stage: a member function of Steps that takes a chunk and returns false if a rank did not arrive.
template <auto kFunction>
struct ChunkStep {
  template <class Steps>
  MOE_A2A_DEVICE static bool run(const Steps& steps, int i) {
    return (steps.*kFunction)(i);
  }
};

// Runs a block's chunks through the stages, each chunks_ahead() behind the previous one. The first stage does not wait.
template <class Steps, class Send, class... Rest, class Args>
MOE_A2A_DEVICE void run_pipeline(const Args& args, Operation operation, const Grid& grid, const Block& block) {
  const auto send = [&](const Part& part) {
    const Steps steps(args, part, grid, block);
    const int num_chunks = steps.most_chunks(), end = chunks_ahead(num_chunks, grid) * grid.size();
    for (int i = grid.rank(); i < num_chunks && i < end; i += grid.size()) Send::run(steps, i);
  };
  const auto receive = [&](const Part& part) {
    const Steps steps(args, part, grid, block);
    const int num_chunks = steps.most_chunks(), distance = chunks_ahead(num_chunks, grid) * grid.size();
    if (grid.rank() >= num_chunks) return meet(part, grid, block);  // else the first stage that waits does
    const auto run = [&](auto stage, int i) {
      return i < grid.rank() || i >= num_chunks || decltype(stage)::run(steps, i);
    };
    bool good = true;
    const int end = num_chunks + static_cast<int>(sizeof...(Rest)) * distance;
    for (int i = grid.rank() + distance; good && i < end; i += grid.size()) {
      int of_stage = i;
      good = run(Send{}, i) && (... && run(Rest{}, of_stage -= distance));
    }
    return good;
  };
  take_part(args, operation, grid, block, send, receive);
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
