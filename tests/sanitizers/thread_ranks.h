// Ranks as threads of this process, each with an ExpertParallel on the CPU target.
#pragma once

#include <gtest/gtest.h>

#include <barrier>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "moe/expert_parallel.h"

namespace moe_a2a {

// Calls body(ep) on one thread per rank. `config.rank` is set for each; the handles go round through memory.
inline void run_ranks(MoeConfig config, double timeout_seconds, const std::function<void(ExpertParallel& ep)>& body) {
  std::vector<CommHandle> handles(config.num_ranks);
  std::barrier all(config.num_ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < config.num_ranks; ++rank) {
    config.rank = rank;
    threads.emplace_back([&, config] {
      ExpertParallel ep(config, "cpu", 0, timeout_seconds);
      handles[config.rank] = ep.comm_handle();
      all.arrive_and_wait();
      ep.connect(handles);
      all.arrive_and_wait();
      try {
        body(ep);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << config.rank << ": " << error.what();
      }
      ep.close();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace moe_a2a
