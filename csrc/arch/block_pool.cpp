#include "arch/block_pool.h"

namespace moe_a2a {

BlockPool::~BlockPool() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  start_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void BlockPool::grow(int num_blocks, size_t shared_bytes) {
  const size_t units = (shared_bytes + sizeof(std::max_align_t) - 1) / sizeof(std::max_align_t);
  if (shared_.size() < static_cast<size_t>(num_blocks)) shared_.resize(num_blocks);
  for (auto& memory : shared_) {
    if (memory.size() < units) memory.resize(units);
  }
  while (static_cast<int>(threads_.size()) + 1 < num_blocks) {
    const int block_rank = static_cast<int>(threads_.size()) + 1;
    threads_.emplace_back([this, block_rank, launch = launch_] { work(block_rank, launch); });
  }
}

void BlockPool::run(int num_blocks, size_t shared_bytes, BlockFunction function, const void* job) {
  if (num_blocks == 1) {  // nobody to wake: the usual case where ranks outnumber the cores
    grow(1, shared_bytes);
    return function(job, 0, 1, reinterpret_cast<std::byte*>(shared_[0].data()));
  }
  {
    std::lock_guard lock(mutex_);
    grow(num_blocks, shared_bytes);
    function_ = function;
    job_ = job;
    num_blocks_ = num_blocks;
    num_running_ = static_cast<int>(threads_.size());
    ++launch_;
  }
  start_.notify_all();
  function(job, 0, num_blocks, reinterpret_cast<std::byte*>(shared_[0].data()));
  std::unique_lock lock(mutex_);
  done_.wait(lock, [this] { return num_running_ == 0; });
}

// `seen` is the newest launch that the thread has no part in.
void BlockPool::work(int block_rank, unsigned long seen) {
  std::unique_lock lock(mutex_);
  while (true) {
    start_.wait(lock, [&] { return stop_ || launch_ != seen; });
    if (stop_) return;
    seen = launch_;
    if (block_rank < num_blocks_) {
      std::byte* shared = reinterpret_cast<std::byte*>(shared_[block_rank].data());
      lock.unlock();
      function_(job_, block_rank, num_blocks_, shared);
      lock.lock();
    }
    if (--num_running_ == 0) done_.notify_one();
  }
}

}  // namespace moe_a2a
