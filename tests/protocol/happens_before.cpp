#include "happens_before.h"

namespace moe_a2a {

HappensBefore::HappensBefore(const void* base, size_t bytes)
    : base_(static_cast<const std::byte*>(base)), cells_(bytes / kGranule), words_(bytes / kGranule) {
  reset();
}

void HappensBefore::reset() {
  ++generation_;
  for (int t = 0; t < kMaxThreads; ++t) {
    clock_[t] = fence_[t] = {};
    clock_[t].time[t] = 1;
  }
}

// ---- plain accesses

Race HappensBefore::unordered_write(int thread, const Cell& cell) const {
  if (cell.writer < 0 || cell.written_at <= clock_[thread].time[cell.writer]) return {};
  return {cell.writer, true};
}

Race HappensBefore::first_after(int thread, const Times& times, bool is_write) const {
  for (int t = 0; t < kMaxThreads; ++t) {
    if (times[t] > clock_[thread].time[t]) return {t, is_write};
  }
  return {};
}

Race HappensBefore::read(int thread, const void* address, size_t bytes) {
  const size_t first = offset_of(address) / kGranule, last = (offset_of(address) + bytes - 1) / kGranule;
  for (size_t i = first; i <= last; ++i) {
    Cell& cell = fresh(cells_, i);
    if (const Race race = unordered_write(thread, cell)) return race;
    if (const Race race = first_after(thread, cell.atomically_written_at, true)) return race;
    cell.read_at[thread] = clock_[thread].time[thread];
  }
  return {};
}

Race HappensBefore::write(int thread, const void* address, size_t bytes) {
  const size_t first = offset_of(address) / kGranule, last = (offset_of(address) + bytes - 1) / kGranule;
  for (size_t i = first; i <= last; ++i) {
    Cell& cell = fresh(cells_, i);
    if (const Race race = unordered_write(thread, cell)) return race;
    if (const Race race = first_after(thread, cell.atomically_written_at, true)) return race;
    if (const Race race = first_after(thread, cell.read_at, false)) return race;
    cell.writer = thread;
    cell.written_at = clock_[thread].time[thread];
    cell.read_at = cell.atomically_written_at = {};
  }
  return {};
}

// ---- atomics

Race HappensBefore::atomic_write(int thread, const void* address) {
  Cell& place = cell(address);
  if (const Race race = unordered_write(thread, place)) return race;
  if (const Race race = first_after(thread, place.read_at, false)) return race;
  place.atomically_written_at[thread] = clock_[thread].time[thread];
  return {};
}

Race HappensBefore::load(int thread, const void* address, Order order) {
  const Race race = unordered_write(thread, cell(address));
  if (order == Order::kAcquire || order == Order::kAcqRel) clock_[thread].join(word(address).handed_over);
  return race;
}

Race HappensBefore::store(int thread, const void* address, Order order) {
  const Race race = atomic_write(thread, address);
  if (order == Order::kRelease || order == Order::kAcqRel) {
    word(address).handed_over = clock_[thread];
    advance(thread);
  } else {
    word(address).handed_over = {};
  }
  return race;
}

Race HappensBefore::add(int thread, const void* address, Order order) {
  const Race race = atomic_write(thread, address);
  Word& place = word(address);
  const VectorClock before = place.handed_over;
  if (order == Order::kRelease || order == Order::kAcqRel) {
    place.handed_over.join(clock_[thread]);
    advance(thread);
  }
  if (order == Order::kAcquire || order == Order::kAcqRel) clock_[thread].join(before);
  return race;
}

bool HappensBefore::sees_newest(int thread, const void* address) {
  return !first_after(thread, cell(address).atomically_written_at, true);
}

void HappensBefore::fence(int thread) {
  fence_[thread] = clock_[thread];
  advance(thread);
}

Race HappensBefore::store_after_fence(int thread, const void* address) {
  const Race race = atomic_write(thread, address);
  // A reader of the value is ordered after its store, although the release is the earlier fence: the word is coherent.
  cell(address).atomically_written_at[thread] = fence_[thread].time[thread];
  word(address).handed_over = fence_[thread];
  return race;
}

}  // namespace moe_a2a
