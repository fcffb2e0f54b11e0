// A communicator of one rank, for tests that do not need a second one.
#pragma once

#include <memory>

#include "comm/communicator.h"

namespace moe_a2a {

inline std::shared_ptr<Communicator> alone() {
  auto comm = std::make_shared<Communicator>(Member{.timeout_seconds = 5.0});
  comm->connect({comm->handle()});
  return comm;
}

}  // namespace moe_a2a
