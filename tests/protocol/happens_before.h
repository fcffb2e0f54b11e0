// Happens-before by vector clocks, and the check that conflicting accesses are ordered by it.
//
// As in FastTrack, a place remembers its last write and, per thread, the last read since. An access races if a
// conflicting one is not in the accessing thread's past. So a race is found whenever the two accesses are unordered in
// the explored schedule, even if they did not coincide.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "arch/order.h"

namespace moe_a2a {

inline constexpr int kMaxThreads = 8;

struct VectorClock {
  std::array<uint32_t, kMaxThreads> time{};

  void join(const VectorClock& other) {
    for (int i = 0; i < kMaxThreads; ++i) time[i] = time[i] < other.time[i] ? other.time[i] : time[i];
  }
};

// The thread whose earlier access conflicts with this one; -1: none.
struct Race {
  int with_thread = -1;
  bool with_write = false;
  explicit operator bool() const { return with_thread >= 0; }
};

class HappensBefore {
 public:
  // Watches [base, base + bytes).
  HappensBefore(const void* base, size_t bytes);

  void reset();  // a new schedule: no accesses yet
  VectorClock& clock(int thread) { return clock_[thread]; }

  Race read(int thread, const void* address, size_t bytes);
  Race write(int thread, const void* address, size_t bytes);

  // Atomics on the watched memory; they race with plain accesses only. A release store replaces what the word passes on
  // to acquirers, an add keeps what was there too.
  Race load(int thread, const void* address, Order order);
  Race store(int thread, const void* address, Order order);
  Race add(int thread, const void* address, Order order);
  // Whether the thread must see the newest store to the word rather than an older one.
  bool sees_newest(int thread, const void* address);
  void fence(int thread);
  // A relaxed store that passes on what the thread's last fence covered.
  Race store_after_fence(int thread, const void* address);

  // How often the word has been written.
  uint32_t version(const void* address) { return word(address).version; }
  void count_write(const void* address) { ++word(address).version; }

 private:
  static constexpr size_t kGranule = 4;

  using Times = std::array<uint32_t, kMaxThreads>;  // per thread; 0: never

  struct Cell {
    uint32_t generation = 0;
    int32_t writer = -1;  // thread of the last plain write
    uint32_t written_at = 0;
    Times read_at{};                // plain reads since that write
    Times atomically_written_at{};  // since that write
  };
  struct Word {
    uint32_t generation = 0;
    uint32_t version = 0;
    VectorClock handed_over;
  };

  size_t offset_of(const void* address) const {
    return static_cast<size_t>(static_cast<const std::byte*>(address) - base_);
  }
  Race unordered_write(int thread, const Cell& cell) const;
  Race first_after(int thread, const Times& times, bool is_write) const;
  Race atomic_write(int thread, const void* address);
  void advance(int thread) { ++clock_[thread].time[thread]; }
  template <class Entry>
  Entry& fresh(std::vector<Entry>& entries, size_t index) {
    Entry& entry = entries[index];
    if (entry.generation != generation_) {
      entry = Entry{};
      entry.generation = generation_;
    }
    return entry;
  }
  Cell& cell(const void* address) { return fresh(cells_, offset_of(address) / kGranule); }
  Word& word(const void* address) { return fresh(words_, offset_of(address) / kGranule); }

  const std::byte* base_;
  uint32_t generation_ = 0;  // of the schedule: cells of an older one count as empty
  std::vector<Cell> cells_;
  std::vector<Word> words_;
  std::array<VectorClock, kMaxThreads> clock_, fence_;
};

}  // namespace moe_a2a
