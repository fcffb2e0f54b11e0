// Base of every object that takes part in collective calls: its region of memory on every rank, one call at a time,
// reports turned into exceptions, and its lifetime from connect() to close(). A Communicator is one, and so are its
// clients.
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "arch/device.h"
#include "comm/call_gate.h"
#include "comm/context.h"
#include "comm/device_share.h"
#include "comm/ordered_launches.h"
#include "comm/peer_errors.h"
#include "comm/region_handle.h"
#include "comm/traced.h"
#include "comm/tracer.h"

namespace moe_a2a {

// Who this rank is, and where it runs.
struct Member {
  int rank = 0;
  int num_ranks = 1;
  std::string target = "cpu";  // "cpu", "cuda" or "hip"
  int device = 0;              // index of the GPU
  double timeout_seconds = 30;

  // Whether its launches occupy a GPU while they wait for other ranks. (`device` is 0 on the CPU, too.)
  bool shares_a_gpu() const { return num_ranks > 1 && target != "cpu"; }
};

// Where a rank tells all ranks of a communicator that it has given up or left.
struct PoisonLink {
  uint32_t* word = nullptr;               // this rank's, in the communicator's region
  const HeapView* heap = nullptr;         // locates the words of the other ranks
  const HeapView* device_heap = nullptr;  // the same, readable by kernels
  // Whether a client of this rank has thrown for a wait that gave up; the others' close() then does not throw it again.
  std::atomic<bool>* has_raised = nullptr;
};

// Calls may come from several threads; they run one at a time. close() ends a wait that another thread is in. Only the
// process that made the object may use it; a forked child can safely drop its copy.
class Client {
 public:
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;
  virtual ~Client();

  const char* name() const { return vocabulary_.client; }
  const Member& member() const { return member_; }
  const Device& device() const { return *device_; }
  size_t nbytes() const { return size_.symmetric_bytes + size_.local_bytes; }

  // Set-up: pass every rank's handle to every rank, in rank order. If connect() throws, nothing stays mapped.
  RegionHandle handle();
  void connect(const std::vector<RegionHandle>& handles);
  // After connect() with handles that the caller carried: waits until every rank has mapped the same objects. Throws
  // PeerTimeout for a rank that has not connected to this object, std::invalid_argument where it was given others.
  void confirm_handles();
  // For an object that cannot be made: disconnect() unmaps the peers; give_back() states that no peer maps this rank's
  // memory, nor ever will.
  void disconnect();
  void give_back() { may_be_mapped_ = false; }

  // Throws what the kernels have reported so far. check() synchronizes the device first.
  virtual void raise_reported();
  void check();
  // No calls after this one; a call that waits in another thread leaves with an error. Memory is freed by the
  // destructor, since views of it may still be held. No effect in a forked child.
  void close();
  bool is_closed() const { return closed_ || closing_; }

  // Hold a turn while using a tracer. All tracers of a client are started, stopped and read together.
  Tracer& tracer() { return tracer_; }
  virtual std::vector<Tracer*> tracers() { return {&tracer_}; }
  [[nodiscard]] CallGate::Turn enter() { return gate_.enter(); }
  void require_own_process() const { gate_.require_own_process(); }
  void require_open() const;
  bool owns(const void* address) const;

 protected:
  // `vocabulary` names the client's launches and waits, and must outlive the client. `context` belongs to the derived
  // class, which launches its kernels with it.
  // `ordered`: the communicator's; null: launches run beside those of other clients. `most_blocks`: the limit on its
  // launches, which leaves the rest of the device to the other clients; 0: none.
  Client(const Member& member, const Vocabulary& vocabulary, ClientContext& context,
         std::shared_ptr<OrderedLaunches> ordered = nullptr, int most_blocks = 0);

  // Called by the derived constructor: allocates the memory. `place` lays out the region from its two bases and returns
  // its size; with null bases only the size is valid.
  using Place = std::function<RegionSize(std::byte* symmetric, std::byte* local)>;
  void allocate(const std::vector<AgreedField>& fields, const Place& place);
  void link(const PoisonLink& poison);

  virtual void after_connect(const HeapView& /*heap*/) {}
  virtual void after_close() {}  // no call can follow
  // For queued launches: whether this refusal has been raised already.
  virtual bool is_known_refusal(const Report& /*report*/) { return false; }
  // Throws a refusal that the client words itself.
  virtual void raise_in_own_words(const Report& /*report*/) {}

  // Launches of one client run in order, even when the caller changes streams; so do those of an ordered communicator.
  template <class Args>
  void launch(const Args& args, int num_blocks, void* stream) {
    const auto queue = [&] { device_->launch(args, trace_of(args).is_on(), num_blocks, stream); };
    if (ordered_ && !device_->is_synchronous()) return ordered_->launch(*device_, stream, queue);
    order_.next(*device_, stream);
    queue();
  }

  // Most blocks per launch: see device_share.h.
  int share_of_device() const;

  // Called before each launch, and after each launch of a synchronous device.
  void raise_waits();
  // Throws only what has put the object out of use: a refusal does not forbid the next call.
  void raise_timeouts();
  void leave_if_interrupted();
  // Called after a launch that waits for no rank: a signal that came meanwhile is this call's, but close() lets it end.
  void leave_if_signalled() {
    if (!closing_) leave_if_interrupted();
  }
  // No peer has mapped this rank, or all have been told that it has left.
  bool nobody_waits() const { return is_closed() || interrupted_ || !connected_; }

  Member member_;
  const Vocabulary& vocabulary_;
  std::unique_ptr<Device> device_;  // owns the region's memory and launches the client's kernels
  CallGate gate_;

 private:
  void allocate_symmetric(const std::vector<AgreedField>& fields);
  void allocate_report();
  void raise_failure();
  void raise_refusal();
  std::exception_ptr leave_peers();
  void say_goodbye();
  void await_mapping(int peer, std::chrono::steady_clock::time_point start) const;
  uint64_t mapped_by(int peer) const;
  void poison_peers();
  void require_share() const;

  ClientContext& context_;
  std::shared_ptr<OrderedLaunches> ordered_;
  DeviceShare share_;
  PoisonLink poison_;
  Tracer tracer_;
  RegionSize size_;
  RegionHandle handle_;
  std::byte* own_heap_ = nullptr;
  std::byte* local_ = nullptr;
  Reports* reports_ = nullptr;
  std::atomic<bool> connected_ = false;
  std::atomic<bool> closing_ = false;  // close() has been called: waiting calls leave
  std::atomic<bool> closed_ = false;
  LaunchOrder order_;
  uint64_t handles_digest_ = 0;  // of what connect() was given
  bool interrupted_ = false;     // a call was interrupted: the peers have been told
  // Whether a peer may write into this memory: from handle() until all ranks have closed.
  std::atomic<bool> may_be_mapped_ = false;

  // How long close() waits for the other ranks to close; the second if this rank has already thrown for a rank that did
  // not arrive, since every client of the communicator waits for it again.
  static constexpr double kGoodbyeSeconds = 5.0, kGoodbyeSecondsIfOneIsMissing = 0.2;
};

}  // namespace moe_a2a
