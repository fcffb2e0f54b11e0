// The CPU as a machine: blocks as threads, memory shared between processes, nothing left behind.

#include "arch/cpu_machine.h"

#include <dirent.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "arch/block_pool.h"
#include "arch/shared_file.h"
#include "seed.h"

namespace moe_a2a {
namespace {

// ---- BlockPool

struct Job {
  std::vector<std::atomic<int>> calls = std::vector<std::atomic<int>>(16);
  std::vector<std::byte*> shared = std::vector<std::byte*>(16);
  int num_blocks = 0;
  size_t shared_bytes = 0;
};

void count_call(const void* job, int block, int num_blocks, std::byte* shared) {
  auto& counted = *static_cast<Job*>(const_cast<void*>(job));
  EXPECT_EQ(num_blocks, counted.num_blocks);
  ++counted.calls[block];
  counted.shared[block] = shared;
  for (size_t i = 0; i < counted.shared_bytes; ++i) shared[i] = static_cast<std::byte>(block);
}

TEST(BlockPool, RunsEveryBlockOnceInEveryLaunch) {
  const uint64_t seed = test_seed();
  std::mt19937 random(static_cast<unsigned>(seed));
  BlockPool pool;
  for (int launch = 0; launch < 3000; ++launch) {
    Job job;
    job.num_blocks = 1 + static_cast<int>(random() % 7);
    job.shared_bytes = random() % 3000;
    pool.run(job.num_blocks, job.shared_bytes, count_call, &job);
    std::set<std::byte*> distinct;
    for (int b = 0; b < 16; ++b) EXPECT_EQ(job.calls[b], b < job.num_blocks ? 1 : 0) << "launch " << launch;
    for (int b = 0; b < job.num_blocks && job.shared_bytes > 0; ++b) {
      distinct.insert(job.shared[b]);
      EXPECT_EQ(job.shared[b][job.shared_bytes - 1], static_cast<std::byte>(b));
    }
    EXPECT_EQ(distinct.size(), job.shared_bytes > 0 ? job.num_blocks : 0);
  }
}

TEST(BlockPool, StopsWithoutEverHavingRun) { BlockPool pool; }

// ---- memory shared between processes

constexpr int kRanks = 4;
constexpr size_t kWords = 5000;

// What the processes share besides the heaps: their handles and a barrier.
struct Board {
  MemoryHandle handle[kRanks];
  std::atomic<int> arrived[8];

  void barrier(int which) {
    arrived[which].fetch_add(1);
    while (arrived[which].load() < kRanks) usleep(200);
  }
};

std::vector<std::string> names_of(const std::vector<pid_t>& pids) {
  std::vector<std::string> names;
  DIR* directory = opendir("/dev/shm");
  while (const dirent* entry = readdir(directory)) {
    const std::string name = entry->d_name;
    for (const pid_t pid : pids) {
      const std::string part = std::to_string(pid).insert(0, 1, '.') + ".";
      if (name.rfind("moe_a2a.", 0) == 0 && name.find(part) != std::string::npos) names.push_back(name);
    }
  }
  closedir(directory);
  return names;
}

// Forks the ranks; each exits by itself or is ended by the alarm.
class Ranks {
 public:
  explicit Ranks(const std::function<bool(int rank, Board& board)>& body)
      : board_(new (mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Board{}) {
    for (int rank = 0; rank < kRanks; ++rank) {
      const pid_t pid = fork();
      if (pid == 0) {
        alarm(20);
        _exit(body(rank, *board_) ? 0 : 1);
      }
      pids_.push_back(pid);
    }
  }
  ~Ranks() { munmap(board_, sizeof(Board)); }

  Board& board() { return *board_; }
  const std::vector<pid_t>& pids() const { return pids_; }
  void wait_for(int which) {
    while (board_->arrived[which].load() < kRanks) usleep(200);
  }
  void kill_rank(int rank) { kill(pids_[rank], SIGKILL); }
  int status(int rank) {
    int status = -1;
    waitpid(pids_[rank], &status, 0);
    return status;
  }

 private:
  Board* board_;
  std::vector<pid_t> pids_;
};

// The heaps of all ranks, as `rank` sees them.
std::vector<uint64_t*> map_all(CpuMachine& machine, int rank, Board& board) {
  std::vector<uint64_t*> heaps(kRanks);
  heaps[rank] = reinterpret_cast<uint64_t*>(machine.allocate_symmetric(kWords * 8, kRanks, &board.handle[rank]));
  board.barrier(0);
  for (int r = 0; r < kRanks; ++r) {
    if (r != rank) heaps[r] = reinterpret_cast<uint64_t*>(machine.open_peer(board.handle[r], 5.0));
  }
  for (int r = 0; r < kRanks; ++r) {
    if (r != rank) machine.confirm_peer(reinterpret_cast<std::byte*>(heaps[r]), rank);
  }
  board.barrier(1);
  return heaps;
}

uint64_t word_of(int owner, int writer, size_t i) { return (uint64_t(owner) * kRanks + writer) << 32 | i; }

TEST(SharedMemory, EveryRankWritesIntoEveryHeapAndNoNameStays) {
  Ranks ranks([](int rank, Board& board) {
    CpuMachine machine(0);
    const auto heaps = map_all(machine, rank, board);
    for (int owner = 0; owner < kRanks; ++owner) {
      for (size_t i = rank; i < kWords; i += kRanks) heaps[owner][i] = word_of(owner, rank, i);
    }
    board.barrier(2);
    bool good = true;
    for (size_t i = 0; i < kWords; ++i) good &= heaps[rank][i] == word_of(rank, static_cast<int>(i % kRanks), i);
    board.barrier(3);
    return good;
  });
  ranks.wait_for(1);
  EXPECT_EQ(names_of(ranks.pids()), std::vector<std::string>{}) << "the last to map takes the name away";
  for (int rank = 0; rank < kRanks; ++rank) EXPECT_EQ(ranks.status(rank), 0);
}

TEST(SharedMemory, IsZeroAndSurvivesTheDeathOfItsOwner) {
  Ranks ranks([](int rank, Board& board) {
    CpuMachine machine(0);
    const auto heaps = map_all(machine, rank, board);
    bool good = true;
    for (size_t i = 0; i < kWords; ++i) good &= heaps[(rank + 1) % kRanks][i] == 0;
    board.barrier(2);
    if (rank == 2) ::pause();  // until killed
    while (board.arrived[7].load() == 0) usleep(200);
    heaps[2][rank] = 7;  // still mapped here
    return good && heaps[2][rank] == 7;
  });
  ranks.wait_for(2);
  ranks.kill_rank(2);
  EXPECT_TRUE(WIFSIGNALED(ranks.status(2)));
  ranks.board().arrived[7] = 1;
  for (const int rank : {0, 1, 3}) EXPECT_EQ(ranks.status(rank), 0);
  EXPECT_EQ(names_of(ranks.pids()), std::vector<std::string>{});
}

// Names used to stay until the next process cleaned up, and forever if their pid namespace had ended.
TEST(SharedMemory, RanksKilledBeforeTheMappingLeaveNothing) {
  Ranks ranks([](int rank, Board& board) {
    CpuMachine machine(0);
    machine.allocate_symmetric(4096, kRanks, &board.handle[rank]);
    board.barrier(0);
    ::pause();
    return false;
  });
  ranks.wait_for(0);
  EXPECT_EQ(names_of(ranks.pids()), std::vector<std::string>{}) << "a heap has no name";
  for (int rank = 0; rank < kRanks; ++rank) ranks.kill_rank(rank);
  for (int rank = 0; rank < kRanks; ++rank) EXPECT_TRUE(WIFSIGNALED(ranks.status(rank)));
  EXPECT_EQ(names_of(ranks.pids()), std::vector<std::string>{});
}

// Like containers: the peers get the id of another pid namespace.
void pretend_to_be_elsewhere(MemoryHandle& handle) {
  FileLocation location;
  std::memcpy(&location, handle.opaque, sizeof(location));
  ++location.pid_namespace;
  std::memcpy(handle.opaque, &location, sizeof(location));
}

TEST(SharedMemory, PidNamespacesMeetByNameAndNoNameStays) {
  Ranks ranks([](int rank, Board& board) {
    CpuMachine machine(0);
    std::byte* own = machine.allocate_symmetric(4096, kRanks, &board.handle[rank]);
    own[1] = static_cast<std::byte>(rank);
    pretend_to_be_elsewhere(board.handle[rank]);
    board.barrier(0);
    std::vector<std::byte*> peers;
    for (int r = 0; r < kRanks; ++r) {
      if (r != rank) peers.push_back(machine.open_peer(board.handle[r], 10.0));
    }
    bool good = true;
    for (int r = 0, i = 0; r < kRanks; ++r) {
      if (r != rank) good &= peers[i++][1] == static_cast<std::byte>(r);
    }
    board.barrier(1);
    while (board.arrived[7].load() == 0) usleep(200);
    if (rank == 0) {  // a rank that connects again confirms again
      for (int time = 0; time < kRanks; ++time) {
        for (std::byte* peer : peers) machine.confirm_peer(peer, rank);
      }
    }
    board.barrier(2);
    while (board.arrived[7].load() == 1) usleep(200);
    for (std::byte* peer : peers) machine.confirm_peer(peer, rank);
    board.barrier(3);
    while (board.arrived[7].load() == 2) usleep(200);
    return good;
  });
  ranks.wait_for(1);
  EXPECT_EQ(names_of(ranks.pids()).size(), size_t{kRanks});
  ranks.board().arrived[7] = 1;
  ranks.wait_for(2);
  EXPECT_EQ(names_of(ranks.pids()).size(), size_t{kRanks}) << "one rank alone does not take names away";
  ranks.board().arrived[7] = 2;
  ranks.wait_for(3);
  EXPECT_EQ(names_of(ranks.pids()), std::vector<std::string>{}) << "the last to confirm takes the name away";
  ranks.board().arrived[7] = 3;
  for (int rank = 0; rank < kRanks; ++rank) EXPECT_EQ(ranks.status(rank), 0);
}

TEST(SharedMemory, NamesOfKilledOwnersGoWithTheNextHeapAndThoseOfTheLivingStay) {
  Ranks ranks([](int rank, Board& board) {
    CpuMachine machine(0);
    machine.allocate_symmetric(4096, kRanks, &board.handle[rank]);
    pretend_to_be_elsewhere(board.handle[rank]);
    board.barrier(0);
    machine.open_peer(board.handle[(rank + 1) % kRanks], 10.0);
    board.barrier(1);
    ::pause();
    return false;
  });
  ranks.wait_for(1);
  ranks.kill_rank(1);
  EXPECT_TRUE(WIFSIGNALED(ranks.status(1)));
  EXPECT_EQ(names_of(ranks.pids()).size(), size_t{kRanks});
  CpuMachine machine(0);
  MemoryHandle handle;
  machine.allocate_symmetric(4096, 2, &handle);
  EXPECT_EQ(names_of(ranks.pids()).size(), size_t{kRanks - 1});
  for (const int rank : {0, 2, 3}) {
    ranks.kill_rank(rank);
    EXPECT_TRUE(WIFSIGNALED(ranks.status(rank)));
  }
  machine.allocate_symmetric(4096, 2, &handle);
  EXPECT_EQ(names_of(ranks.pids()), std::vector<std::string>{});
}

TEST(SharedMemory, ThreadsShareOneMappingUntilTheLastLetsGo) {
  MemoryHandle handle;
  auto owner = std::make_unique<CpuMachine>(0);
  CpuMachine peer(0);
  owner->allocate_symmetric(4096, 2, &handle)[100] = std::byte{42};
  std::byte* seen = peer.open_peer(handle, 1.0);
  owner.reset();
  EXPECT_EQ(seen[100], std::byte{42});
  handle.address = 1 << 20;
  EXPECT_THROW(CpuMachine(0).open_peer(handle, 1.0), std::runtime_error);
}

// Two containers may both have a process with this pid.
TEST(SharedMemory, APidIsNoIdentity) {
  MemoryHandle handle;
  CpuMachine owner(0), peer(0);
  owner.allocate_symmetric(4096, 2, &handle);
  ++handle.process.word[1];
  try {
    peer.open_peer(handle, 1.0);  // same pid and descriptor, but another identity
    FAIL() << "an address of another process was taken for one of ours";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("belongs to another process"), std::string::npos) << error.what();
  }
}

TEST(SharedMemory, AForkedChildIsAnotherProcess) {
  const ProcessIdentity parent = this_process();
  const pid_t pid = fork();
  if (pid == 0) _exit(this_process() == parent ? 1 : 0);
  int status = -1;
  waitpid(pid, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(this_process() == parent);
}

// A file found in place of a heap must be verified before anything is mapped or written.
TEST(SharedMemory, RefusesWhatIsNotTheHeapOfTheHandle) {
  Ranks ranks([](int rank, Board& board) {
    CpuMachine machine(0);
    machine.allocate_symmetric(kWords * 8, kRanks, &board.handle[rank]);
    board.barrier(0);
    if (rank != 0) {
      board.barrier(1);
      return true;
    }
    const auto refused = [&](auto change, const char* why) {
      MemoryHandle handle = board.handle[1];
      FileLocation location;
      std::memcpy(&location, handle.opaque, sizeof(location));
      change(handle, location);
      std::memcpy(handle.opaque, &location, sizeof(location));
      try {
        machine.open_peer(handle, 0.2);
      } catch (const std::exception& error) {
        if (std::string(error.what()).find(why) != std::string::npos) return true;
        ADD_FAILURE() << error.what();
        return false;
      }
      ADD_FAILURE() << "accepted, although: " << why;
      return false;
    };
    using H = MemoryHandle;
    using L = FileLocation;
    bool good = refused([](H& h, L&) { h.nbytes += 4096; }, "bytes, expected");
    good &= refused([](H& h, L&) { h.nbytes -= 4096; }, "bytes, expected");
    good &= refused([](H&, L& l) { l.inode += 1; }, "is gone");
    good &= refused([](H&, L& l) { l.fd = 0; }, "is gone");
    good &= refused([](H&, L& l) { l.fd = 1 << 20; }, "it has ended or closed");
    good &= refused([&](H& h, L&) { h.process.pid = board.handle[2].process.pid; }, "is gone");
    good &= refused([](H& h, L&) { h.process.word[0] ^= 1; }, "belongs to another process");
    good &= refused([](H&, L& l) { l.pid_namespace += 1; }, "did not appear");
    machine.open_peer(board.handle[1], 0.2);
    board.barrier(1);
    return good;
  });
  for (int rank = 0; rank < kRanks; ++rank) EXPECT_EQ(ranks.status(rank), 0);
}

TEST(SharedMemory, RefusesAnotherMachineAndTooLittleSpace) {
  CpuMachine machine(0);
  EXPECT_THROW(machine.open_peer(MemoryHandle{.nbytes = 4096, .machine_id = this_machine_id() + 1}, 1.0),
               std::runtime_error);
  MemoryHandle handle;
  try {
    machine.allocate_symmetric(size_t{1} << 50, 2, &handle);
    FAIL() << "a heap of 2^50 bytes";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("/dev/shm"), std::string::npos) << error.what();
  }
  EXPECT_EQ(names_of({getpid()}), std::vector<std::string>{});
}

// Each heap keeps its file until its peers have mapped it, and no longer.
TEST(SharedMemory, ManyObjectsDoNotUseUpTheFileDescriptors) {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  const rlimit few{64, limit.rlim_max};
  setrlimit(RLIMIT_NOFILE, &few);
  std::vector<std::unique_ptr<CpuMachine>> machines;
  for (int i = 0; i < 200; ++i) {
    machines.push_back(std::make_unique<CpuMachine>(0));
    machines.push_back(std::make_unique<CpuMachine>(0));
    MemoryHandle handle;
    machines[2 * i]->allocate_symmetric(4096, 2, &handle);
    machines[2 * i + 1]->confirm_peer(machines[2 * i + 1]->open_peer(handle, 1.0), 1);
  }
  setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace
}  // namespace moe_a2a
