// The device heaps of a process: an address from a handle is used only if a heap of that size is live there.
#include "arch/live_memory.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "arch/memory_handle.h"

namespace moe_a2a {
namespace {

TEST(LiveMemory, KnowsWhatLivesAndHowLargeItIs) {
  LiveMemory memory;
  EXPECT_EQ(memory.nbytes_at(4096), 0);
  memory.add(4096, 100);
  EXPECT_EQ(memory.nbytes_at(4096), 100);
  EXPECT_EQ(memory.nbytes_at(4097), 0);
  memory.remove(4096);
  EXPECT_EQ(memory.nbytes_at(4096), 0);
}

TEST(LiveMemory, AHandleIsTakenOnlyIfItsHeapIsLiveAndThatLarge) {
  const MemoryHandle handle{.nbytes = 100};
  require_live(handle, 100);
  EXPECT_THROW(require_live(handle, 101), std::invalid_argument);
  EXPECT_THROW(require_live(handle, 0), std::runtime_error);
}

}  // namespace
}  // namespace moe_a2a
