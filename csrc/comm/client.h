// What every object has that takes part in calls of all ranks: its region of memory on every rank, one call at a time,
// reports that become exceptions, and its life from connect() to close(). A Communicator is one, and so is each of its
// clients.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "comm/call_gate.h"
#include "comm/context.h"
#include "comm/device.h"
#include "comm/peer_errors.h"
#include "comm/region_handle.h"
#include "comm/tracer.h"

namespace moe_a2a {

// Who this rank is, and where it runs.
struct Member {
  int rank = 0;
  int num_ranks = 1;
  std::string target = "cpu";  // "cpu", "cuda" or "hip"
  int device = 0;              // of a GPU: its index
  double timeout_seconds = 30;
};

// Where a rank tells all ranks of a communicator that it has given up or left.
struct PoisonLink {
  uint32_t* word = nullptr;               // this rank's, in the communicator's region
  const HeapView* heap = nullptr;         // where those of the other ranks are
  const HeapView* device_heap = nullptr;  // the same, where kernels can read it
};

// Calls may come from several threads: each waits until the one before has ended. close() ends the wait of a call that
// another thread is in. Only the process that made the object may use it; a forked child lets go of its copy unharmed.
class Client {
 public:
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;
  virtual ~Client();

  const Member& member() const { return member_; }
  const Device& device() const { return *device_; }
  size_t nbytes() const { return size_.symmetric_bytes + size_.local_bytes; }

  // Set-up: every rank's handle to every rank, in rank order. When connect() raises, nothing stays mapped.
  RegionHandle handle();
  void connect(const std::vector<RegionHandle>& handles);
  // When the object cannot be made: unmaps the peers; says that no peer maps this rank's memory, nor will.
  void disconnect();
  void give_back() { may_be_mapped_ = false; }

  // Raises what the kernels have reported so far. check() waits for the device first.
  virtual void raise_reported();
  void check();
  // No call after this one; a call of another thread that waits leaves with an error. The memory goes with the object:
  // views of it may still be held. In a forked child nothing happens.
  void close();
  bool is_closed() const { return closed_ || closing_; }

  // A turn is held while the tracer is used.
  Tracer& tracer() { return tracer_; }
  [[nodiscard]] CallGate::Turn enter() { return gate_.enter(); }
  void require_own_process() const { gate_.require_own_process(); }
  void require_open() const;
  bool is_connected() const { return connected_; }
  // Whether an address lies in the memory of this object.
  bool owns(const void* address) const;

 protected:
  // `vocabulary` names the client's launches and waits; it outlives the client. `context` is the client's own, which it
  // launches its kernels with.
  Client(const Member& member, const Vocabulary& vocabulary, ClientContext& context);

  // Takes the memory, in the constructor of the client. place(symmetric, local) lays out the region there.
  template <class Place>
  void allocate(const RegionSize& size, const std::vector<AgreedField>& fields, const Place& place) {
    try {
      std::byte* symmetric = allocate_symmetric(size, fields);
      local_ = device_->allocate_local(size.local_bytes);
      place(symmetric, local_);
      allocate_report();
    } catch (...) {
      device_->close();  // nobody else knows of this memory yet
      throw;
    }
  }
  void link(const PoisonLink& poison);

  virtual void after_connect(const HeapView& /*heap*/) {}
  virtual void after_close() {}  // no call can follow
  // Where launches are queued: whether the refusal has been raised before.
  virtual bool is_known_refusal(const Report& /*report*/) { return false; }
  // Raises a refusal that the client has words of its own for.
  virtual void raise_in_own_words(const Report& /*report*/) {}

  // Launches of one client come one after the other, also when the caller's stream changes.
  template <class Args>
  void launch(const Args& args, int num_blocks, void* stream) {
    if (has_launched_ && stream != last_stream_) device_->order_streams(last_stream_, stream);
    has_launched_ = true;
    last_stream_ = stream;
    device_->launch(args, num_blocks, stream);
  }

  // How many blocks a launch takes at most unless the caller says otherwise. All of the device's while this is the only
  // client there; half of them beside others, so that kernels of two clients on two streams are resident at once: each
  // waits for its peers, which may run them in the other order.
  int share_of_device() const;

  // Before each launch, and behind each one of a synchronous device.
  void raise_waits();
  // The same for what has put the object out of use: a call that a refusal has come to light before may still be made.
  void raise_timeouts();
  void leave_if_interrupted();
  // Nobody has mapped this rank, or all have been told already that it has left.
  bool nobody_waits() const { return is_closed() || interrupted_ || !connected_; }

  Member member_;
  const Vocabulary& vocabulary_;
  std::unique_ptr<Device> device_;  // owns the region's memory, launches the client's kernels
  CallGate gate_;

 private:
  std::byte* allocate_symmetric(const RegionSize& size, const std::vector<AgreedField>& fields);
  void allocate_report();
  void part();
  void poison_peers();

  ClientContext& context_;
  PoisonLink poison_;
  Tracer tracer_;
  RegionSize size_;
  RegionHandle handle_;
  std::byte* own_heap_ = nullptr;
  std::byte* local_ = nullptr;
  Report* report_ = nullptr;
  std::atomic<bool> connected_ = false;
  std::atomic<bool> closing_ = false;  // close() has been called: calls that wait leave
  std::atomic<bool> closed_ = false;
  bool has_launched_ = false;
  void* last_stream_ = nullptr;
  bool interrupted_ = false;  // a call was left in its middle: the peers have been told
  // Whether a peer may write into this memory: from the time that its handle is out until all ranks have closed.
  std::atomic<bool> may_be_mapped_ = false;

  // How long a close waits for the other ranks to close.
  static constexpr double kPartingSeconds = 5.0;
};

}  // namespace moe_a2a
