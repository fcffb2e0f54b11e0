// A function on a stack of its own that runs until it switches to another fiber. A switch makes no system call;
// swapcontext() makes one, to set the signal mask.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#if defined(_FORTIFY_SOURCE) && _FORTIFY_SOURCE > 0
#error "compile with -U_FORTIFY_SOURCE: it forbids jumps to another stack"
#endif

namespace moe_a2a {

class Fiber {
 public:
  // Whatever calls switch_to() from outside all fibers.
  Fiber() = default;
  // The first switch to it calls body(), which must not return.
  Fiber(size_t stack_bytes, std::function<void()> body) : body_(std::move(body)), stack_(new std::byte[stack_bytes]) {
    getcontext(&first_);
    first_.uc_stack = {.ss_sp = stack_.get(), .ss_flags = 0, .ss_size = stack_bytes};
    first_.uc_link = nullptr;
    const auto address = reinterpret_cast<uint64_t>(this);
    makecontext(&first_, reinterpret_cast<void (*)()>(enter), 2, static_cast<unsigned>(address >> 32),
                static_cast<unsigned>(address));
  }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Continues `next`; returns when a fiber switches back to this one.
  void switch_to(Fiber& next) {
    if (_setjmp(here_) == 0) next.resume();
  }
  // The next switch calls body() again. What it was doing is abandoned, without destructors.
  void restart() { begins_ = true; }

 private:
  [[noreturn]] void resume() {
    if (!begins_) _longjmp(here_, 1);
    begins_ = false;
    if (has_begun_) _longjmp(begin_, 1);
    has_begun_ = true;
    setcontext(&first_);
    __builtin_unreachable();
  }
  static void enter(unsigned high, unsigned low) {
    auto* self = reinterpret_cast<Fiber*>(uint64_t{high} << 32 | low);
    _setjmp(self->begin_);
    self->body_();
  }

  std::function<void()> body_;
  std::unique_ptr<std::byte[]> stack_;
  ucontext_t first_;
  jmp_buf begin_, here_;
  bool has_begun_ = false;
  bool begins_ = body_ != nullptr;
};

}  // namespace moe_a2a
