// How a wait inside a CPU launch learns that it should end: the launching thread polls a hook. This layer does not know
// Python; the bindings install the hook.
#pragma once

#include <atomic>
#include <stdexcept>

namespace moe_a2a {

// Called every 50 ms by the process's main thread while it waits for other ranks or threads. True: the wait should end.
using HostHook = bool (*)();
void set_host_hook(HostHook hook);

// Calls the hook if it is due. False without a hook, and outside the main thread.
bool is_host_interrupted();
// Whether this thread is inside the hook: a signal handler is running in the middle of a call.
bool is_inside_host_hook();

// The hook ended a wait on the host.
struct Interrupted : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// One machine's interrupt flag. Never cleared: an interrupted launch has left its peers in the middle of a call.
class Interrupt {
 public:
  void set() { flag_.store(true, std::memory_order_relaxed); }
  bool is_set() const { return flag_.load(std::memory_order_relaxed); }

  // The calling thread runs a block of a launch during this object's lifetime. `asks_host`: it is the launching thread.
  class Scope {
   public:
    Scope(Interrupt& interrupt, bool asks_host);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Interrupt* outer_;
    bool outer_asks_;
  };

 private:
  std::atomic<bool> flag_ = false;
};

// Whether the launch that this thread runs a block of should end; false outside a launch.
bool is_launch_interrupted();

}  // namespace moe_a2a
