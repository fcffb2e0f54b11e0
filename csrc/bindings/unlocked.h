// Python's lock, given up around what may wait for kernels: these may wait for a rank in another thread, which needs
// the lock for its launches.
#pragma once

#include <optional>

#include "bindings/python.h"

namespace moe_a2a::bindings {

// Gives up the GIL, if this thread holds it. At the interpreter's end nobody else takes it, and it cannot be given up.
class Unlocked {
 public:
  Unlocked() {
    if (Py_IsInitialized() && PyGILState_Check()) unlocked_.emplace();
  }

 private:
  std::optional<pybind11::gil_scoped_release> unlocked_;
};

}  // namespace moe_a2a::bindings
