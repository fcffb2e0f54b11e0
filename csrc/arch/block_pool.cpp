#include "arch/block_pool.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace moe_a2a {

struct BlockPool::State {
  // True during its lifetime.
  struct Running {
    explicit Running(bool& flag) : flag(flag) { flag = true; }
    ~Running() { flag = false; }
    bool& flag;
  };
  ~State();
  void grow(int num_blocks, size_t shared_bytes);
  void add_thread(int num_blocks);
  void run(int num_blocks, size_t shared_bytes, BlockFunction function, const void* job);
  void work(int block_rank, unsigned long seen);
  void wait_for_all();

  Interrupt interrupt;
  std::vector<std::thread> threads;                   // of blocks 1, 2, ...
  std::vector<std::vector<std::max_align_t>> shared;  // per block
  std::mutex mutex;
  std::condition_variable start, done;
  BlockFunction function = nullptr;
  const void* job = nullptr;
  int num_blocks = 0, num_running = 0;
  unsigned long launch = 0;
  bool stop = false;
  bool is_running = false;  // for the launching thread
};

BlockPool::BlockPool() : state_(new State) {}

BlockPool::~BlockPool() = default;

void BlockPool::run(int num_blocks, size_t shared_bytes, BlockFunction function, const void* job) {
  state_->run(num_blocks, shared_bytes, function, job);
}

void BlockPool::interrupt() { state_->interrupt.set(); }

bool BlockPool::is_interrupted() const { return state_->interrupt.is_set(); }

BlockPool::State::~State() {
  {
    std::lock_guard lock(mutex);
    stop = true;
  }
  start.notify_all();
  for (std::thread& thread : threads) thread.join();
}

void BlockPool::State::grow(int num_blocks, size_t shared_bytes) {
  const size_t units = (shared_bytes + sizeof(std::max_align_t) - 1) / sizeof(std::max_align_t);
  if (shared.size() < static_cast<size_t>(num_blocks)) shared.resize(num_blocks);
  for (auto& memory : shared) {
    if (memory.size() < units) memory.resize(units);
  }
  while (static_cast<int>(threads.size()) + 1 < num_blocks) add_thread(num_blocks);
}

void BlockPool::State::add_thread(int num_blocks) {
  const int block_rank = static_cast<int>(threads.size()) + 1;
  try {
    threads.emplace_back([this, block_rank, seen = launch] { work(block_rank, seen); });
  } catch (const std::system_error& error) {
    throw std::runtime_error("the system has no thread left for block " + std::to_string(block_rank + 1) + " of " +
                             std::to_string(num_blocks) + ": " + error.code().message() +
                             "; pass a smaller num_blocks, or raise the limits of this process (ulimit -u, ulimit -v, "
                             "in a container its pids limit)");
  }
}

void BlockPool::State::run(int blocks, size_t shared_bytes, BlockFunction block_function, const void* block_job) {
  if (is_running) throw std::runtime_error("a signal handler made a call in the middle of another on the same threads");
  const Running running(is_running);
  const Interrupt::Scope scope(interrupt, true);
  if (blocks == 1) {  // no thread to wake: the usual case when ranks outnumber cores
    grow(1, shared_bytes);
    return block_function(block_job, 0, 1, reinterpret_cast<std::byte*>(shared[0].data()));
  }
  {
    std::lock_guard lock(mutex);
    grow(blocks, shared_bytes);
    function = block_function;
    job = block_job;
    num_blocks = blocks;
    num_running = static_cast<int>(threads.size());
    ++launch;
  }
  start.notify_all();
  block_function(block_job, 0, blocks, reinterpret_cast<std::byte*>(shared[0].data()));
  wait_for_all();
}

// The other blocks may wait for other ranks long after block 0 has finished, so poll the host hook here too.
void BlockPool::State::wait_for_all() {
  std::unique_lock lock(mutex);
  while (num_running > 0) {
    done.wait_for(lock, std::chrono::milliseconds(50));
    if (num_running == 0) return;
    lock.unlock();
    (void)is_launch_interrupted();
    lock.lock();
  }
}

// `seen`: the latest launch that the thread takes no part in.
void BlockPool::State::work(int block_rank, unsigned long seen) {
  const Interrupt::Scope scope(interrupt, false);
  std::unique_lock lock(mutex);
  while (true) {
    start.wait(lock, [&] { return stop || launch != seen; });
    if (stop) return;
    seen = launch;
    if (block_rank < num_blocks) {
      std::byte* memory = reinterpret_cast<std::byte*>(shared[block_rank].data());
      lock.unlock();
      function(job, block_rank, num_blocks, memory);
      lock.lock();
    }
    if (--num_running == 0) done.notify_one();
  }
}

}  // namespace moe_a2a
