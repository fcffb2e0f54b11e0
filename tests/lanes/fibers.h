// The threads of a block as fibers of one OS thread: each runs until it waits for others, then the next one runs.
// Always in the same order, so a block is deterministic given its inputs and what other blocks do.
#pragma once

#include <sched.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "fiber.h"

namespace moe_a2a::lanes {

// A barrier. It does not wait for threads that have left the kernel, as on a GPU.
class Meeting {
 public:
  void expect(int num_members) { num_members_ = num_members, num_here_ = 0; }
  // Returns a ticket; the caller may continue once is_over(ticket).
  uint64_t arrive() {
    const uint64_t ticket = round_;
    ++num_here_;
    open_if_complete();
    return ticket;
  }
  bool is_over(uint64_t ticket) const { return round_ != ticket; }
  void leave() {
    --num_members_;
    open_if_complete();
  }

 private:
  void open_if_complete() {
    if (num_here_ < num_members_ || num_here_ == 0) return;
    num_here_ = 0;
    ++round_;
  }
  int num_members_ = 0, num_here_ = 0;
  uint64_t round_ = 0;
};

// A block's threads, on the calling OS thread.
class Fibers {
 public:
  static Fibers& of_block() {
    static thread_local Fibers fibers;
    return fibers;
  }

  // Calls body() in each of num_threads fibers; returns when all have finished.
  void run(int num_threads, int warp_size, const std::function<void()>& body) {
    body_ = &body;
    warp_size_ = warp_size;
    while (static_cast<int>(threads_.size()) < num_threads) threads_.push_back(std::make_unique<Thread>(*this));
    warps_.resize((num_threads + warp_size - 1) / warp_size);
    for (Meeting& warp : warps_) warp.expect(warp_size);
    block_.expect(num_threads);
    for (int i = 0; i < num_threads; ++i) threads_[i]->has_ended = false;
    for (int num_left = num_threads; num_left > 0;) {
      has_paused_ = false;
      for (current_ = 0; current_ < num_threads; ++current_) {
        Thread& thread = *threads_[current_];
        if (thread.has_ended) continue;
        scheduler_.switch_to(thread.fiber);
        if (!thread.has_ended) continue;
        --num_left;
        warps_[current_ / warp_size].leave();
        block_.leave();
      }
      if (has_paused_) sched_yield();  // other blocks and ranks are OS threads
    }
  }

  int current() const { return current_; }
  void meet_warp() { meet(warps_[current_ / warp_size_]); }
  void meet_block() { meet(block_); }
  void pause() {
    has_paused_ = true;
    yield();
  }

 private:
  struct Thread {
    explicit Thread(Fibers& block) : fiber(kStackBytes, [&block, this] { block.main_of(*this); }) {}

    static constexpr size_t kStackBytes = 128 << 10;
    Fiber fiber;
    bool has_ended = true;
  };

  // One body() after another.
  void main_of(Thread& thread) {
    while (true) {
      (*body_)();
      thread.has_ended = true;
      yield();
    }
  }
  void yield() { threads_[current_]->fiber.switch_to(scheduler_); }
  void meet(Meeting& meeting) {
    for (const uint64_t ticket = meeting.arrive(); !meeting.is_over(ticket);) yield();
  }

  std::vector<std::unique_ptr<Thread>> threads_;
  std::vector<Meeting> warps_;
  Meeting block_;
  Fiber scheduler_;
  const std::function<void()>* body_ = nullptr;
  int warp_size_ = 1, current_ = 0;
  bool has_paused_ = false;
};

}  // namespace moe_a2a::lanes
