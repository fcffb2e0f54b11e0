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
  std::vector<RegionHandle> comm_handles(config.num_ranks), handles(config.num_ranks);
  std::barrier all(config.num_ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < config.num_ranks; ++rank) {
    config.rank = rank;
    threads.emplace_back([&, config] {
      const auto comm = std::make_shared<Communicator>(
          Member{.rank = config.rank, .num_ranks = config.num_ranks, .timeout_seconds = timeout_seconds});
      ExpertParallel ep(comm, config);
      comm_handles[config.rank] = comm->handle();
      handles[config.rank] = ep.handle();
      all.arrive_and_wait();
      comm->connect(comm_handles);
      ep.connect(handles);
      all.arrive_and_wait();
      try {
        body(ep);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << config.rank << ": " << error.what();
      }
      ep.close();
      comm->close();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace moe_a2a
