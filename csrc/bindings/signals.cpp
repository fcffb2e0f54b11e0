#include "bindings/signals.h"

#include <utility>

#include "arch/interrupt.h"
#include "bindings/python.h"

namespace moe_a2a::bindings {
namespace {

// Held aside while the call unwinds: destructors on the way may run Python code. A pointer, since what is left when the
// thread ends must not be destroyed: the interpreter may be gone.
thread_local py::error_already_set* raised = nullptr;

// Runs the handlers of pending signals; true if one of them raised.
bool has_signal() {
  const py::gil_scoped_acquire locked;
  if (PyErr_CheckSignals() == 0) return false;
  delete raised;
  raised = new py::error_already_set;
  return true;
}

}  // namespace

void watch_signals() { set_host_hook(has_signal); }

bool restore_signal_error() {
  if (raised == nullptr) return false;
  raised->restore();
  delete std::exchange(raised, nullptr);
  return true;
}

void raise_signal_error() {
  if (raised == nullptr) return;
  const py::gil_scoped_acquire locked;
  restore_signal_error();
  throw py::error_already_set();
}

}  // namespace moe_a2a::bindings
