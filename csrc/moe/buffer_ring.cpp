#include "moe/buffer_ring.h"

#include <algorithm>
#include <utility>

#include "moe/vocabulary.h"

namespace moe_a2a {
namespace {

using Stage = DispatchHandle::Stage;

// From one dispatch's number to a later one's, as far as a credit can tell.
uint32_t distance(uint64_t from, uint64_t to) {
  return static_cast<uint32_t>(std::min<uint64_t>(to - from, CreditNote::kMostRefused));
}

}  // namespace

int BufferRing::next() const {
  const int n = static_cast<int>(buffers_.size());
  for (const bool reclaim : {false, true}) {
    for (int i = 1; i <= n; ++i) {
      const int buffer = (last_ + i) % n;
      const auto& open = buffers_[buffer].open;
      if (!open || open->stage == Stage::kRefused || (reclaim && open.use_count() == 1)) return buffer;
    }
  }
  return -1;
}

int BufferRing::first_free() const {
  const auto free = std::find_if(buffers_.begin(), buffers_.end(), [](const Buffer& buffer) { return !buffer.open; });
  return free == buffers_.end() ? -1 : static_cast<int>(free - buffers_.begin());
}

void BufferRing::take(int buffer_idx, const std::shared_ptr<DispatchHandle>& handle) {
  Buffer& buffer = buffers_[buffer_idx];
  if (const auto before = buffer.newest.lock()) before->stage = Stage::kClosed;
  buffer.open = handle;
  buffer.newest = handle;
  newest_ = handle;
  last_before_ = std::exchange(last_, buffer_idx);
  last_number_before_ = std::exchange(buffer.last_number, ++num_dispatches_);
  if (!handle) last_failed_ = num_dispatches_;
}

void BufferRing::pass() {
  newest_.reset();
  ++num_dispatches_;
}

void BufferRing::refuse() {
  pass();
  last_refused_ = num_dispatches_;
}

void BufferRing::close() {
  for (Buffer& buffer : buffers_) {
    if (buffer.open) buffer.open->stage = Stage::kClosed;
    buffer.open = nullptr;
  }
}

DispatchNumber BufferRing::number_of_next(int buffer) const {
  const uint64_t number = num_dispatches_ + 1;
  return {.number = number, .since = distance(buffers_[buffer].last_number, number)};
}

CreditNote BufferRing::credit_note(const DispatchHandle& handle) const {
  const auto [number, since] = handle.number;
  return {.since = since, .refused = last_refused_ <= number ? 0 : distance(number, last_refused_)};
}

// The number of a refused dispatch is 0 in a captured graph, which may be replayed: its handle stays open.
bool BufferRing::is_known(const Report& refusal) {
  if (refusal.buffer == static_cast<int>(buffers_.size())) return take_back(refusal.expected_epoch);
  Buffer& buffer = buffers_[refusal.buffer];
  const uint64_t raised = std::exchange(buffer.raised_refusal, refusal.expected_epoch);
  if (raised == refusal.expected_epoch) return true;
  const auto handle = buffer.newest.lock();
  if (!handle) return false;
  if (refusal.operation == moe_op::kDispatchRecv) {
    const bool is_its = static_cast<uint32_t>(handle->number.number) == refusal.refusal_count;
    if (is_its && handle->stage < Stage::kCombineSent) handle->stage = Stage::kRefused;
  } else if (handle->stage == Stage::kCombined && refusal.refusal_count != RefusalCount::kFinal) {
    const uint64_t number = refusal.seen_epoch;  // of the refused dispatch; 0: unknown, in a captured graph
    if (number != 0 && number != handle->number.number) return false;  // an earlier one, whose handle is closed
    handle->stage = Stage::kCombineSent;
    handle->note_refusal(refusal.peer, refusal.refusal_count);
    buffer.open = handle;
  }
  return false;
}

// A peer had no buffer for this dispatch, so it did not take place and its buffer is again the next one. Returns true
// if this is already known: each block may report it, and a rank that refused the same dispatch has raised its own
// error.
bool BufferRing::take_back(uint64_t number) {
  if (number <= last_taken_back_) return true;
  last_taken_back_ = number;
  if (number == num_dispatches_) {
    buffers_[last_].last_number = last_number_before_;
    last_ = last_before_;
  }
  for (Buffer& buffer : buffers_) {
    const auto handle = buffer.newest.lock();
    if (!handle || handle->number.number != number) continue;
    handle->stage = Stage::kClosed;
    if (buffer.open == handle) buffer.open = nullptr;
  }
  return number == last_failed_;
}

}  // namespace moe_a2a
