// The CPU's blocks: one OS thread each, kept between launches, so that a launch neither starts threads nor allocates.
#pragma once

#include <cstddef>

#include "arch/interrupt.h"
#include "arch/process.h"

namespace moe_a2a {

class BlockPool {
 public:
  using BlockFunction = void (*)(const void* job, int block_rank, int num_blocks, std::byte* shared);

  BlockPool();
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;
  ~BlockPool();

  // Runs function(job, i, num_blocks, shared memory of block i) for every block and returns when all are done. The
  // calling thread is block 0.
  void run(int num_blocks, size_t shared_bytes, BlockFunction function, const void* job);

  // Ends the waits of the running launch and of all later ones; see is_launch_interrupted(). Callable from any thread.
  void interrupt();
  bool is_interrupted() const;

 private:
  struct State;

  OwnedByMaker<State> state_;
};

}  // namespace moe_a2a
