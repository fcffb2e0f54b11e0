// The device heaps of a process: an address from a handle is used only if a heap of that size is live there.
#include "arch/live_memory.h"

#include <gtest/gtest.h>

#include <stdexcept>

namespace moe_a2a {
namespace {

TEST(LiveMemory, KnowsWhatLivesAndHowLargeItIs) {
  LiveMemory memory;
  EXPECT_THROW(memory.require(4096, 100), std::runtime_error);
  memory.add(4096, 100);
  memory.require(4096, 100);
  EXPECT_THROW(memory.require(4096, 101), std::invalid_argument);
  EXPECT_THROW(memory.require(4097, 100), std::runtime_error);
  memory.remove(4096);
  EXPECT_THROW(memory.require(4096, 100), std::runtime_error);
}

}  // namespace
}  // namespace moe_a2a
