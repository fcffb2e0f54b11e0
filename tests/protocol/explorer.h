// Runs threads one at a time and tries their interleavings.
//
// A program is what one stream runs: a sequence of launches, each of one or more blocks. Each block of a program is a
// thread. A thread may be preempted before each atomic operation of device or system scope. It yields when it polls
// words that nobody has written since, and at the end of a launch. Two ways to search the space of schedules:
//
//   all()     depth first, every schedule with at most `delays` departures from the default one, in which a thread runs
//             until it waits and the next in turn takes over; passing over one thread is one delay
//   random()  schedules drawn from seeds, each of which reproduces its schedule
//
// A schedule fails on a race, on a wrong value that a program finds (fail()), or when all threads wait.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "fiber.h"
#include "happens_before.h"
#include "mutation.h"

namespace moe_a2a {

struct Launch {
  std::string who, name;
  int num_blocks = 1;
  std::function<void(int block)> body;
  int num_counted_blocks = num_blocks;  // blocks that are counted, see count_block()
};
using Program = std::vector<Launch>;

// The memory that programs share, and its state before the first launch.
class Stage {
 public:
  virtual ~Stage() = default;
  virtual std::vector<Program> programs() const = 0;
  virtual void reset() = 0;
  virtual std::byte* memory() const = 0;
  virtual size_t nbytes() const = 0;
  virtual Field field_of(const void* address) const = 0;
  // Whether the word belongs to a pair of ranks that exchange no tokens.
  virtual bool is_unused_pair(const void* address) const = 0;
  virtual std::string name_of(const void* address) const = 0;
  // How often the clock may jump past every deadline once nothing else can happen.
  virtual int num_clock_jumps() const { return 0; }
  // How far a stream's clock is ahead of the explorer's.
  virtual uint64_t clock_offset(int /*stream*/) const { return 0; }
};

struct Exploration {
  int64_t num_schedules = 0;
  bool complete = false;  // every schedule within the bound has run
  std::string failure;    // of the schedule that ended the search; empty: none failed
  std::string trace;      // the last operations of that schedule
};

class Explorer {
 public:
  Explorer(Stage& stage, const Mutation& mutation);

  Exploration all(int delays, int64_t max_schedules);
  Exploration random(uint64_t seed, int64_t num_schedules);

  // ---- for the explored code, during a thread's turn
  static Explorer* running() { return running_; }  // null outside a schedule
  [[noreturn]] void fail(const std::string& why);
  // Whether the mutation breaks the current thread's next operation on `field`.
  bool is_broken(Mutation::Kind kind, Field field) const;

  uint64_t load(const void* address, size_t bytes, Order order);
  void store(void* address, size_t bytes, uint64_t value, Order order);
  uint64_t add(void* address, size_t bytes, uint64_t value, Order order);
  bool claim(void* address, size_t bytes, uint64_t expected, uint64_t desired, Order order);
  void fence();
  void read(const void* address, size_t bytes);
  void write(const void* address, size_t bytes);
  void pause();
  uint64_t clock() { return ++now_ + stage_.clock_offset(current_->stream); }

 private:
  static constexpr size_t kStackBytes = size_t{1} << 17;

  struct Thread {
    enum class State { kReady, kAsleep, kParked };  // parked: not part of the launch, or done with it
    struct Seen {
      const void* address;
      uint32_t version;
      uint32_t read_at;  // the thread's num_pauses at that time
    };

    explicit Thread(std::function<void(Thread&)> main) : fiber(kStackBytes, [main, this] { main(*this); }) {}

    int id = 0, stream = 0, block = 0;
    State state = State::kParked;
    Fiber fiber;
    std::vector<Seen> seen;  // words it has read, and their versions; those of the current wait come last
    uint32_t num_pauses = 0;
    int idle_polls = 0;  // since it last read something new
  };
  struct Stream {
    std::vector<Thread*> threads;
    size_t launch = 0;
    int num_running = 0;
    VectorClock joined;  // knowledge of its finished launches
  };
  struct Decision {
    int taken, num_options;
  };

  bool run_schedule();
  void main_of(Thread& thread);
  void start_launch(Stream& stream, size_t index);
  void end_launch(Thread& thread);

  void schedule_point();
  void give_up_turn();
  void switch_to(Thread& next);
  void add_others();
  Thread& choose();
  bool let_time_pass();
  bool next_path();

  uint64_t load_text(const void* address);
  uint64_t mutated_ll(Field field, uint64_t word) const;
  void check(const Race& race, const void* address, const char* access);
  void wake_watchers(const void* address);
  void record(const char* operation, const void* address, uint64_t value);
  const Launch& launch_of(const Thread& thread) const;
  std::string describe(const Thread& thread) const;

  static inline Explorer* running_ = nullptr;

  Stage& stage_;
  Mutation mutation_;
  HappensBefore order_;
  std::vector<Program> programs_;
  std::vector<std::unique_ptr<Thread>> threads_;
  std::vector<Stream> streams_;
  Fiber main_;  // of the search
  Thread* current_ = nullptr;
  std::vector<Thread*> options_;  // of the next choice

  std::vector<Decision> path_;
  size_t depth_ = 0;
  int delays_left_ = 0, max_delays_ = 0;
  bool draws_ = false;
  std::mt19937_64 generator_;

  std::map<Field, uint32_t> newest_stamp_;  // of a field's LL words
  uint64_t now_ = 0;
  int clock_jumps_ = 0;
  std::string failure_;
  bool tracing_ = false;
  std::vector<std::string> trace_;
};

}  // namespace moe_a2a
