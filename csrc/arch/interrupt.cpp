#include "arch/interrupt.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>

namespace moe_a2a {
namespace {

constexpr auto kBetweenLooks = std::chrono::milliseconds(50);

std::atomic<HostHook> host_hook = nullptr;

struct ThreadState {
  Interrupt* interrupt = nullptr;
  bool asks_host = false;
  bool inside_hook = false;
  std::chrono::steady_clock::time_point last_look;
};
thread_local ThreadState state;

bool is_main_thread() { return syscall(SYS_gettid) == getpid(); }

}  // namespace

void set_host_hook(HostHook hook) { host_hook.store(hook); }

bool is_inside_host_hook() { return state.inside_hook; }

bool is_host_interrupted() {
  const HostHook hook = host_hook.load(std::memory_order_relaxed);
  if (hook == nullptr || state.inside_hook) return false;
  const auto now = std::chrono::steady_clock::now();
  if (now - state.last_look < kBetweenLooks) return false;
  state.last_look = now;
  if (!is_main_thread()) return false;
  state.inside_hook = true;
  const bool interrupted = hook();
  state.inside_hook = false;
  return interrupted;
}

Interrupt::Scope::Scope(Interrupt& interrupt, bool asks_host) : outer_(state.interrupt), outer_asks_(state.asks_host) {
  state.interrupt = &interrupt;
  state.asks_host = asks_host;
}

Interrupt::Scope::~Scope() {
  state.interrupt = outer_;
  state.asks_host = outer_asks_;
}

bool is_launch_interrupted() {
  if (state.interrupt == nullptr) return false;
  if (state.asks_host && is_host_interrupted()) state.interrupt->set();
  return state.interrupt->is_set();
}

}  // namespace moe_a2a
