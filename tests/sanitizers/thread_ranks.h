// Ranks as threads of this process, on the CPU target.
#pragma once

#include <gtest/gtest.h>

#include <barrier>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "moe/expert_parallel.h"

namespace moe_a2a {

// Where ranks exchange the handles of a client that they all make.
class Meeting {
 public:
  explicit Meeting(int num_ranks) : handles_(num_ranks), all_(num_ranks) {}

  void connect(Client& client) {
    handles_[client.member().rank] = client.handle();
    all_.arrive_and_wait();
    client.connect(handles_);
    all_.arrive_and_wait();
  }
  void wait() { all_.arrive_and_wait(); }

 private:
  std::vector<RegionHandle> handles_;
  std::barrier<> all_;
};

// Calls body(comm, meeting) on one thread per rank, with a connected communicator.
inline void run_communicators(
    int num_ranks, double timeout_seconds,
    const std::function<void(const std::shared_ptr<Communicator>& comm, Meeting& meeting)>& body) {
  Meeting meeting(num_ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      const auto comm = std::make_shared<Communicator>(
          Member{.rank = rank, .num_ranks = num_ranks, .timeout_seconds = timeout_seconds});
      meeting.connect(*comm);
      try {
        body(comm, meeting);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
      comm->close();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Calls body(ep) on one thread per rank. `config.rank` is set for each.
inline void run_ranks(const MoeConfig& config, double timeout_seconds,
                      const std::function<void(ExpertParallel& ep)>& body) {
  run_communicators(config.num_ranks, timeout_seconds,
                    [&](const std::shared_ptr<Communicator>& comm, Meeting& meeting) {
                      MoeConfig own = config;
                      own.rank = comm->member().rank;
                      ExpertParallel ep(comm, own);
                      meeting.connect(ep);
                      body(ep);
                      ep.close();
                    });
}

}  // namespace moe_a2a
