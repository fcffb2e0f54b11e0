// Thrown by an allocation that is too large for the machine.
#pragma once

#include <stdexcept>

namespace moe_a2a {

struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace moe_a2a
