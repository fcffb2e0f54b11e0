// Which dispatch holds which buffer, and how many there have been. Only bookkeeping: it launches nothing. All ranks
// make the same calls, so their rings agree.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "moe/dispatch_handle.h"

namespace moe_a2a {

class BufferRing {
 public:
  explicit BufferRing(int num_buffers) : buffers_(num_buffers), last_(num_buffers - 1), last_before_(last_) {}

  // The buffer that the next dispatch takes, round-robin; -1: all are open. If it has a holder, release that first: its
  // dispatch was refused, so the buffer is free on the rank that refused; or, only if no other buffer is free, its
  // handle was dropped without combine or release.
  int next() const;
  // The handle that has the buffer open; null: none.
  std::shared_ptr<DispatchHandle> holder(int buffer) const { return buffers_[buffer].open; }
  int first_free() const;  // -1: all are open

  // Counts a dispatch that has been launched into this buffer. Null handle: this rank refused it.
  void take(int buffer, const std::shared_ptr<DispatchHandle>& handle);
  // Counts a dispatch that took no buffer: a peer had none, or (refuse) this rank.
  void pass();
  void refuse();
  void give_back(int buffer) { buffers_[buffer].open = nullptr; }
  void close();  // closes the open handles

  template <class Visit>
  void for_open(const Visit& visit) const {
    for (const Buffer& buffer : buffers_) {
      if (buffer.open) visit(*buffer.open);
    }
  }
  // The handle of the newest dispatch; null: it was refused, or the handle is gone.
  std::shared_ptr<DispatchHandle> newest() const { return newest_.lock(); }

  // Dispatches so far, including refused ones.
  uint64_t num_dispatches() const { return num_dispatches_; }
  DispatchNumber number_of_next(int buffer) const;
  // Of the credit that ends this rank's use of the handle's buffer.
  CreditNote credit_note(const DispatchHandle& handle) const;

  // Where launches are queued, a refusal surfaces after its call. A launch's first report reopens the handle of a
  // combine that may be retried, or closes that of a refused dispatch. Returns true for the reports of the launch's
  // other warps, which may come once the handle is gone.
  bool is_known(const Report& refusal);
  // Before a launch that waits for sums: its refusal is news, even if one of the same epoch has been raised.
  void expect_refusal(int buffer) { buffers_[buffer].raised_refusal = 0; }

 private:
  // One of the sets of slots that dispatches take in turn.
  struct Buffer {
    std::shared_ptr<DispatchHandle> open;  // null: free
    std::weak_ptr<DispatchHandle> newest;  // its latest handle
    uint64_t last_number = 0;              // of the dispatch that had it last
    uint64_t raised_refusal = 0;           // epoch whose refusal was raised; 0: not for the latest launch
  };

  bool take_back(uint64_t number);

  std::vector<Buffer> buffers_;
  int last_;
  // For take_back(): what the newest dispatch has replaced.
  int last_before_;
  uint64_t last_number_before_ = 0;
  std::weak_ptr<DispatchHandle> newest_;  // null: it was refused
  std::atomic<uint64_t> num_dispatches_ = 0;
  // The number of the latest dispatch that ...
  uint64_t last_refused_ = 0;     // this rank had no buffer for
  uint64_t last_failed_ = 0;      // failed on this rank for another reason
  uint64_t last_taken_back_ = 0;  // a peer had no buffer for
};

}  // namespace moe_a2a
