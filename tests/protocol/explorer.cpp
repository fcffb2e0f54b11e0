#include "explorer.h"

#include <algorithm>

#include "observed.h"

namespace moe_a2a {

Explorer::Explorer(Stage& stage, const Mutation& mutation)
    : stage_(stage),
      mutation_(mutation),
      order_(stage.memory(), stage.nbytes()),
      programs_(stage.programs()),
      streams_(programs_.size()) {
  for (size_t s = 0; s < programs_.size(); ++s) {
    int blocks = 1;
    for (const Launch& launch : programs_[s]) blocks = std::max(blocks, launch.num_blocks);
    for (int b = 0; b < blocks; ++b) {
      threads_.push_back(std::make_unique<Thread>([this](Thread& thread) { main_of(thread); }));
      Thread& thread = *threads_.back();
      thread.id = static_cast<int>(threads_.size()) - 1;
      thread.stream = static_cast<int>(s);
      thread.block = b;
      streams_[s].threads.push_back(&thread);
    }
  }
  if (threads_.size() > kMaxThreads) throw std::length_error("more threads than a VectorClock holds");
}

// ---- the search

Exploration Explorer::all(int delays, int64_t max_schedules) {
  Exploration result;
  max_delays_ = delays;
  draws_ = false;
  path_.clear();
  do {
    ++result.num_schedules;
    if (!run_schedule()) break;
    result.complete = !next_path();
  } while (!result.complete && result.num_schedules < max_schedules);
  if (!failure_.empty()) {
    tracing_ = true;
    run_schedule();  // the same path again
    tracing_ = false;
  }
  result.failure = failure_;
  for (const std::string& line : trace_) result.trace += line + "\n";
  return result;
}

Exploration Explorer::random(uint64_t seed, int64_t num_schedules) {
  Exploration result;
  draws_ = true;
  while (result.num_schedules < num_schedules) {
    generator_.seed(seed + static_cast<uint64_t>(result.num_schedules++));
    if (run_schedule()) continue;
    result.failure = failure_ + " (seed " + std::to_string(seed + result.num_schedules - 1) + ")";
    break;
  }
  return result;
}

// Advances to the next schedule in depth-first order; false when there is none.
bool Explorer::next_path() {
  while (!path_.empty() && path_.back().taken + 1 == path_.back().num_options) path_.pop_back();
  if (path_.empty()) return false;
  ++path_.back().taken;
  return true;
}

bool Explorer::run_schedule() {
  stage_.reset();
  order_.reset();
  depth_ = 0;
  delays_left_ = max_delays_;
  clock_jumps_ = 0;
  now_ = 0;
  newest_stamp_.clear();
  failure_.clear();
  trace_.clear();
  for (auto& thread : threads_) {
    thread->fiber.restart();
    thread->state = Thread::State::kParked;
    thread->seen.clear();
    thread->idle_polls = 0;
  }
  for (Stream& stream : streams_) {
    stream.joined = {};
    start_launch(stream, 0);
  }
  running_ = this;
  watched_memory = {stage_.memory(), stage_.nbytes()};
  current_ = threads_.front().get();
  main_.switch_to(current_->fiber);  // returns when all are done or one has failed
  watched_memory = {};
  running_ = nullptr;
  return failure_.empty();
}

// ---- threads and launches

void Explorer::main_of(Thread& thread) {
  while (true) {
    Stream& stream = streams_[thread.stream];
    programs_[thread.stream][stream.launch].body(thread.block);
    end_launch(thread);
    if (thread.state != Thread::State::kReady) give_up_turn();
  }
}

void Explorer::start_launch(Stream& stream, size_t index) {
  const Program& program = programs_[&stream - streams_.data()];
  stream.launch = index;
  if (index == program.size()) return;
  stream.num_running = program[index].num_blocks;
  for (int b = 0; b < stream.num_running; ++b) {
    Thread& thread = *stream.threads[b];
    VectorClock& clock = order_.clock(thread.id);
    clock.join(stream.joined);
    ++clock.time[thread.id];
    thread.state = Thread::State::kReady;
  }
}

void Explorer::end_launch(Thread& thread) {
  Stream& stream = streams_[thread.stream];
  stream.joined.join(order_.clock(thread.id));
  thread.state = Thread::State::kParked;
  thread.seen.clear();
  if (--stream.num_running == 0) start_launch(stream, stream.launch + 1);
}

// ---- turns

// Before an operation that others can see: this thread may be preempted.
void Explorer::schedule_point() {
  if (!draws_ && delays_left_ == 0) return;
  options_.assign(1, current_);
  add_others();
  Thread& next = choose();
  if (&next != current_) switch_to(next);
}

// The thread cannot continue: another one must.
void Explorer::give_up_turn() {
  options_.clear();
  do {
    add_others();
    if (current_->state == Thread::State::kReady) options_.push_back(current_);
  } while (options_.empty() && let_time_pass());
  if (options_.empty()) {
    std::string who;
    for (const auto& thread : threads_) {
      if (thread->state == Thread::State::kAsleep) who += " [" + describe(*thread) + "]";
    }
    if (!who.empty()) fail("everybody waits:" + who);
    current_->fiber.switch_to(main_);  // all have ended
  }
  Thread& next = choose();
  if (&next != current_) switch_to(next);
}

// The threads that can run, round-robin from the current one.
void Explorer::add_others() {
  const int n = static_cast<int>(threads_.size());
  for (int i = 1; i < n; ++i) {
    Thread& thread = *threads_[(current_->id + i) % n];
    if (thread.state == Thread::State::kReady) options_.push_back(&thread);
  }
}

void Explorer::switch_to(Thread& next) {
  Thread* before = current_;
  current_ = &next;
  before->fiber.switch_to(next.fiber);
}

// Taking option i passes over i threads.
Explorer::Thread& Explorer::choose() {
  const int n = static_cast<int>(options_.size());
  if (draws_) return *options_[generator_() % n];
  const int num_affordable = std::min(n, delays_left_ + 1);
  if (num_affordable == 1) return *options_.front();
  if (depth_ == path_.size()) path_.push_back({0, num_affordable});
  const int taken = path_[depth_++].taken;
  delays_left_ -= taken;
  return *options_[taken];
}

bool Explorer::let_time_pass() {
  if (clock_jumps_ == stage_.num_clock_jumps()) return false;
  ++clock_jumps_;
  now_ += uint64_t{1} << 40;
  for (auto& thread : threads_) {
    if (thread->state != Thread::State::kAsleep) continue;
    thread->state = Thread::State::kReady;
    thread->idle_polls = 0;
  }
  return true;
}

void Explorer::fail(const std::string& why) {
  failure_ = describe(*current_) + ": " + why;
  current_->fiber.switch_to(main_);
  std::abort();  // nothing switches back
}

// ---- names

bool Explorer::is_broken(Mutation::Kind kind, Field field) const {
  if (mutation_.kind != kind || mutation_.field != field) return false;
  return mutation_.launch.empty() || mutation_.launch == launch_of(*current_).name;
}

const Launch& Explorer::launch_of(const Thread& thread) const {
  return programs_[thread.stream][streams_[thread.stream].launch];
}

std::string Explorer::describe(const Thread& thread) const {
  if (streams_[thread.stream].launch == programs_[thread.stream].size()) return "a thread that has ended";
  const Launch& launch = launch_of(thread);
  return launch.who + " in " + launch.name + (launch.num_blocks > 1 ? ", block " + std::to_string(thread.block) : "");
}

}  // namespace moe_a2a
