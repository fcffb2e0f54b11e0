#include "bindings/signals.h"

#include <optional>

#include "arch/interrupt.h"
#include "bindings/python.h"

namespace moe_a2a::bindings {
namespace {

// Held aside while the call unwinds: destructors on the way may run Python code.
thread_local std::optional<py::error_already_set> raised;

// Runs the handlers of pending signals; true if one of them raised.
bool has_signal() {
  const py::gil_scoped_acquire locked;
  if (PyErr_CheckSignals() == 0) return false;
  raised.emplace();
  return true;
}

}  // namespace

void watch_signals() { set_host_hook(has_signal); }

bool restore_signal_error() {
  if (!raised) return false;
  raised->restore();
  raised.reset();
  return true;
}

}  // namespace moe_a2a::bindings
