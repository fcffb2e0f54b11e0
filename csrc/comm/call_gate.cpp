#include "comm/call_gate.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

#include "arch/interrupt.h"

namespace moe_a2a {

struct CallGate::State {
  std::mutex mutex;
  std::condition_variable is_free;
  std::thread::id owner;
  int depth = 0;
};

CallGate::CallGate(std::string what) : what_(std::move(what)), state_(new State) {}

CallGate::~CallGate() = default;

CallGate::Turn CallGate::enter() {
  require_own_process();
  const std::thread::id self = std::this_thread::get_id();
  std::unique_lock lock(state_->mutex);
  if (state_->depth > 0 && state_->owner == self) {
    if (is_inside_host_hook()) {
      throw std::runtime_error("a signal handler called this " + what_ + " in the middle of another of its calls");
    }
    ++state_->depth;
    return Turn(*this);
  }
  while (state_->depth > 0) {
    state_->is_free.wait_for(lock, std::chrono::milliseconds(50));
    if (state_->depth == 0) break;
    lock.unlock();
    if (is_host_interrupted()) throw Interrupted("interrupted while another thread was in a call of this " + what_);
    lock.lock();
  }
  state_->owner = self;
  state_->depth = 1;
  return Turn(*this);
}

bool CallGate::is_inside() const {
  const std::lock_guard lock(state_->mutex);
  return state_->depth > 0 && state_->owner == std::this_thread::get_id();
}

void CallGate::leave() {
  const std::lock_guard lock(state_->mutex);
  if (--state_->depth == 0) state_->is_free.notify_one();
}

}  // namespace moe_a2a
