// The CPU's blocks: one OS thread each, kept between launches so that a launch neither starts a thread nor allocates.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <thread>
#include <vector>

namespace moe_a2a {

class BlockPool {
 public:
  using BlockFunction = void (*)(const void* job, int block_rank, int num_blocks, std::byte* shared);

  BlockPool() = default;
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;
  ~BlockPool();

  // Runs function(job, i, num_blocks, shared memory of block i) for every block and returns when all are done.
  // The calling thread is block 0.
  void run(int num_blocks, size_t shared_bytes, BlockFunction function, const void* job);

 private:
  void work(int block_rank, unsigned long seen);
  void grow(int num_blocks, size_t shared_bytes);

  std::vector<std::thread> threads_;                   // of blocks 1, 2, ...
  std::vector<std::vector<std::max_align_t>> shared_;  // per block
  std::mutex mutex_;
  std::condition_variable start_, done_;
  BlockFunction function_ = nullptr;
  const void* job_ = nullptr;
  int num_blocks_ = 0, num_running_ = 0;
  unsigned long launch_ = 0;
  bool stop_ = false;
};

}  // namespace moe_a2a
