// The ranks of a test without host objects: one Context each; their heaps are mapped to each other in this process.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include "moe/context.h"

namespace moe_a2a {

struct alignas(128) CacheLine {
  std::byte bytes[128] = {};
};
using Memory = std::vector<CacheLine>;  // zeroed
inline Memory make_memory(size_t nbytes) { return Memory(nbytes / sizeof(CacheLine) + 1); }

struct Heaps {
  std::vector<Context> context;  // [num_ranks]
  std::vector<Reports> reports;
  std::vector<std::array<uint32_t, Reports::kNum>> num_reports;
  std::vector<Memory> symmetric, local;

  explicit Heaps(MoeConfig config)
      : context(config.num_ranks), reports(config.num_ranks), num_reports(config.num_ranks) {
    for (int r = 0; r < config.num_ranks; ++r) {
      config.rank = r;
      Context& c = context[r];
      c.config = config;
      const RegionSize size = place_region(c, nullptr, nullptr);
      symmetric.push_back(make_memory(size.symmetric_bytes));
      local.push_back(make_memory(size.local_bytes));
      place_region(c, memory_of(symmetric[r]), memory_of(local[r]));
      c.heap = {.rank = r, .num_ranks = config.num_ranks};
      c.wait.reports = &reports[r];
      c.wait.num_reports = num_reports[r].data();
      c.max_shared_bytes = 1 << 20;
    }
    for (Context& c : context) {
      for (int r = 0; r < config.num_ranks; ++r) c.heap.base[r] = memory_of(symmetric[r]);
    }
  }
  Heaps(const Heaps&) = delete;
  Heaps& operator=(const Heaps&) = delete;

  static std::byte* memory_of(Memory& memory) { return memory.front().bytes; }
};

// A block's shared memory.
struct SharedMemory {
  explicit SharedMemory(size_t nbytes) : memory(make_memory(nbytes)) {}
  std::byte* data() { return memory.front().bytes; }

  Memory memory;
};

}  // namespace moe_a2a
