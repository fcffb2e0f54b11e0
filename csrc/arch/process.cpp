#include "arch/process.h"

#include <pthread.h>
#include <unistd.h>

#include <random>
#include <stdexcept>

namespace moe_a2a {
namespace {

ProcessIdentity draw() {
  std::random_device random;  // the kernel's generator: a fork cannot repeat it
  const auto word = [&] { return uint64_t{random()} << 32 | random(); };
  return {.word = {word(), word()}, .pid = static_cast<uint64_t>(getpid())};
}

// Drawn when the library loads: a child must differ from its parent even if the parent never asked.
ProcessIdentity identity = draw();
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { identity = draw(); });

}  // namespace

const ProcessIdentity& this_process() { return identity; }

void MakerProcess::require(const std::string& what) const {
  if (is_this_process()) return;
  throw std::runtime_error("this " + what + " was made by process " + std::to_string(maker_.pid) +
                           " and this is process " + std::to_string(this_process().pid) +
                           ", forked from it; construct one after the fork");
}

}  // namespace moe_a2a
