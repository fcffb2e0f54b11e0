// The semantics of the explored code's operations: their effect on memory, on happens-before, and on sleeping threads.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "comm/signal.h"
#include "explorer.h"
#include "observed.h"

namespace moe_a2a {
namespace {

// A waiting loop checks more than its own word only occasionally (kPollsPerLook). After this many polls
// without anything new, a thread has checked everything that can end its wait.
constexpr int kPollsBeforeSleep = 8;
// Words not read for this many polls belong to an earlier wait.
constexpr uint32_t kPollsOfAWait = 6;

uint64_t value_at(const void* address, size_t bytes) {
  uint64_t value = 0;
  std::memcpy(&value, address, bytes);
  return value;
}

uint64_t masked(uint64_t value, size_t bytes) { return bytes == 8 ? value : value & ((uint64_t{1} << 8 * bytes) - 1); }

}  // namespace

uint64_t Explorer::load(const void* address, size_t bytes, Order order) {
  const Field field = stage_.field_of(address);
  if (field == Field::kRefusalText) return load_text(address);
  if (is_broken(Mutation::Kind::kRelaxedAcquire, field)) order = Order::kRelaxed;
  auto& seen = current_->seen;
  const auto known = std::find_if(seen.begin(), seen.end(), [&](const auto& s) { return s.address == address; });
  // Polling an unchanged word is equivalent to being scheduled later, so this hides no schedule.
  const bool again = current_->idle_polls > 0 && known != seen.end() && known->version == order_.version(address);
  if (!again) {
    schedule_point();
    current_->idle_polls = 0;
    const auto place = std::find_if(seen.begin(), seen.end(), [&](const auto& s) { return s.address == address; });
    if (place == seen.end()) {
      seen.push_back({address, order_.version(address), current_->num_pauses});
    } else {
      *place = {address, order_.version(address), current_->num_pauses};
    }
  } else {
    known->read_at = current_->num_pauses;
  }
  check(order_.load(current_->id, address, order), address, "loads");
  uint64_t value = value_at(address, bytes);
  if (is_ll(field)) {
    value = mutated_ll(field, value);
  } else {
    if (is_broken(Mutation::Kind::kWaitSkipped, field)) value += uint64_t{1} << 60;  // 2^40 epochs later
    if (is_broken(Mutation::Kind::kOneEpochEarly, field)) value += uint64_t{1} << 20;
    if (is_broken(Mutation::Kind::kOneUseEarly, field)) value += uint64_t{2} << 20;
  }
  if (!again) record(order == Order::kAcquire ? "load acquire" : "load relaxed", address, value);
  return value;
}

// For mutants that accept stale LL words: the word with the newest stamp that any rank has written to its field.
uint64_t Explorer::mutated_ll(Field field, uint64_t word) const {
  const bool always = is_broken(Mutation::Kind::kWaitSkipped, field);
  const auto newest = newest_stamp_.find(field);
  const uint32_t too_early = is_broken(Mutation::Kind::kOneEpochEarly, field) ? 1
                             : is_broken(Mutation::Kind::kOneUseEarly, field) ? 2
                                                                              : 0;
  if (newest == newest_stamp_.end() || !(always || too_early > 0)) return word;
  const auto stamp = static_cast<uint32_t>(word >> 32), later = ((stamp + too_early) | 1u << 31);
  if (!always && later != newest->second) return word;
  return uint64_t{newest->second} << 32 | static_cast<uint32_t>(word);
}

// The words of a text are relaxed and nobody waits for them: a reader that its signal does not order may get the
// previous value. No schedule points: a mixture of two texts is not an error.
uint64_t Explorer::load_text(const void* address) {
  return order_.sees_newest(current_->id, address) ? value_at(address, sizeof(uint64_t)) : 0;
}

void Explorer::store(void* address, size_t bytes, uint64_t value, Order order) {
  const Field field = stage_.field_of(address);
  if (field != Field::kRefusalText) schedule_point();
  current_->seen.clear();
  if (is_broken(Mutation::Kind::kStoreLost, field)) return;
  if (is_broken(Mutation::Kind::kLostWhenUnused, field) && stage_.is_unused_pair(address)) return;
  if (is_ll(field)) newest_stamp_[field] = static_cast<uint32_t>(value >> 32);
  if (is_broken(Mutation::Kind::kStampFirst, field)) {
    std::memcpy(static_cast<std::byte*>(address) + 4, reinterpret_cast<const std::byte*>(&value) + 4, 4);
    wake_watchers(address);
    schedule_point();
  }
  if (is_broken(Mutation::Kind::kPayloadLost, field)) value &= ~uint64_t{Signal::kPayloadMask};
  if (is_broken(Mutation::Kind::kRelaxedRelease, field)) order = Order::kRelaxed;
  if (mutation_.signals_by_fence && order == Order::kRelease && field != Field::kReportState) {
    check(order_.store_after_fence(current_->id, address), address, "stores");
  } else {
    check(order_.store(current_->id, address, order), address, "stores");
  }
  std::memcpy(address, &value, bytes);
  record(order == Order::kRelease ? "store release" : "store relaxed", address, value);
  wake_watchers(address);
}

uint64_t Explorer::add(void* address, size_t bytes, uint64_t value, Order order) {
  schedule_point();
  current_->seen.clear();
  const Field field = stage_.field_of(address);
  if (is_broken(Mutation::Kind::kRelaxedRelease, field)) order = Order::kAcquire;
  if (is_broken(Mutation::Kind::kRelaxedAcquire, field)) order = Order::kRelease;
  if (is_broken(Mutation::Kind::kAddLost, field)) value = 0;
  if (is_broken(Mutation::Kind::kAddedTwice, field)) value *= 2;
  check(order_.add(current_->id, address, order), address, "adds to");
  const uint64_t before = value_at(address, bytes), after = before + value;
  std::memcpy(address, &after, bytes);
  record("add", address, value);
  wake_watchers(address);
  if (is_broken(Mutation::Kind::kEveryoneIsLast, field)) {
    return launch_of(*current_).num_counted_blocks - 1;
  }
  return before;
}

bool Explorer::claim(void* address, size_t bytes, uint64_t expected, uint64_t desired, Order order) {
  schedule_point();
  current_->seen.clear();
  const bool claimed = value_at(address, bytes) == expected;
  if (claimed) {
    check(order_.add(current_->id, address, order), address, "claims");
    std::memcpy(address, &desired, bytes);
    wake_watchers(address);
  }
  record("claim", address, claimed);
  return claimed;
}

void Explorer::fence() {
  if (mutation_.kind != Mutation::Kind::kFenceLost) order_.fence(current_->id);
}

void Explorer::read(const void* address, size_t bytes) {
  if (bytes == 0) return;
  check(order_.read(current_->id, address, bytes), address, "reads");
}

void Explorer::write(const void* address, size_t bytes) {
  if (bytes == 0) return;
  check(order_.write(current_->id, address, bytes), address, "writes");
}

void Explorer::check(const Race& race, const void* address, const char* access) {
  if (!race) return;
  fail(std::string("race: ") + access + " " + stage_.name_of(address) + ", unordered with a " +
       (race.with_write ? "write" : "read") + " by [" + describe(*threads_[race.with_thread]) + "]");
}

// After enough polls without anything new, sleeps until one of the polled words is written.
void Explorer::pause() {
  ++current_->num_pauses;
  if (++current_->idle_polls < kPollsBeforeSleep) return;
  current_->idle_polls = 0;
  std::erase_if(current_->seen, [&](const auto& s) { return current_->num_pauses - s.read_at > kPollsOfAWait; });
  for (const auto& seen : current_->seen) {
    if (order_.version(seen.address) != seen.version) return;
  }
  current_->state = Thread::State::kAsleep;
  give_up_turn();
}

void Explorer::wake_watchers(const void* address) {
  order_.count_write(address);
  for (auto& thread : threads_) {
    if (thread->state != Thread::State::kAsleep) continue;
    for (const auto& seen : thread->seen) {
      if (seen.address == address) thread->state = Thread::State::kReady;
    }
  }
}

void Explorer::record(const char* operation, const void* address, uint64_t value) {
  if (!tracing_) return;
  char text[32];
  std::snprintf(text, sizeof(text), "%#llx", static_cast<unsigned long long>(value));
  trace_.push_back(describe(*current_) + ": " + operation + " " + stage_.name_of(address) + " " + text);
  if (trace_.size() > 40) trace_.erase(trace_.begin());
}

// ---- called by the explored code

uint64_t observed_load(const void* address, size_t bytes, Order order) {
  return masked(Explorer::running()->load(address, bytes, order), bytes);
}
void observed_store(void* address, size_t bytes, uint64_t value, Order order) {
  Explorer::running()->store(address, bytes, value, order);
}
uint64_t observed_add(void* address, size_t bytes, uint64_t value, Order order) {
  return masked(Explorer::running()->add(address, bytes, value, order), bytes);
}
bool observed_claim(void* address, size_t bytes, uint64_t expected, uint64_t desired, Order order) {
  return Explorer::running()->claim(address, bytes, expected, desired, order);
}
void observed_fence() { Explorer::running()->fence(); }
void watched_read(const void* address, size_t bytes) { Explorer::running()->read(address, bytes); }
void watched_write(const void* address, size_t bytes) { Explorer::running()->write(address, bytes); }
void observed_pause() { Explorer::running()->pause(); }
uint64_t observed_clock() { return Explorer::running()->clock(); }

}  // namespace moe_a2a
