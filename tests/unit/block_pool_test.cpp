// The threads that run the CPU's blocks.
#include "arch/block_pool.h"

#include <gtest/gtest.h>

#include <chrono>
#include <stdexcept>
#include <thread>

namespace moe_a2a {
namespace {

BlockPool* pool = nullptr;
int num_refused = 0;

void last_block_is_slow(const void*, int block_rank, int num_blocks, std::byte*) {
  if (block_rank == num_blocks - 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
}

TEST(BlockPool, RefusesALaunchInTheMiddleOfAnother) {
  BlockPool of_test;
  pool = &of_test;
  set_host_hook([] {
    try {
      pool->run(3, 64, last_block_is_slow, nullptr);
    } catch (const std::runtime_error&) {
      ++num_refused;
    }
    return false;
  });
  of_test.run(2, 64, last_block_is_slow, nullptr);
  set_host_hook(nullptr);
  EXPECT_GT(num_refused, 0);
  of_test.run(3, 64, last_block_is_slow, nullptr);
}

}  // namespace
}  // namespace moe_a2a
