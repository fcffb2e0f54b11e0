// How a wait inside a launch on the CPU learns that it should end: the thread that launched looks around now and then.
// Nothing here knows Python; the bindings install a hook that does.
#pragma once

#include <atomic>
#include <stdexcept>

namespace moe_a2a {

// Called every 50 ms by the process's main thread while it waits for other ranks or threads. True: the wait should end.
using HostHook = bool (*)();
void set_host_hook(HostHook hook);

// Asks the hook if it is due, in the main thread. False elsewhere, and without a hook.
bool is_host_interrupted();
// Whether this thread is inside the hook: a signal handler is running in the middle of a call.
bool is_inside_host_hook();

// A wait on the host was ended by the hook.
struct Interrupted : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The flag of one machine's launches. Once set it stays set: the launch has left its peers in the middle of a call.
class Interrupt {
 public:
  void set() { flag_.store(true, std::memory_order_relaxed); }
  bool is_set() const { return flag_.load(std::memory_order_relaxed); }

  // The calling thread runs a block of a launch until the object goes. `asks_host`: in the thread that launched.
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
