// The host object: owns the memory, hands out buffers, launches the kernels, turns a report into an exception.
// Knows nothing of PyTorch: tensors arrive as addresses and strides, already checked by the caller.
#pragma once

#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "comm/call_gate.h"
#include "comm/comm_handle.h"
#include "comm/device.h"
#include "comm/peer_errors.h"
#include "comm/tracer.h"
#include "moe/args.h"
#include "moe/launch_table.h"

namespace moe_a2a {

// Routing that only the kernels could see was wrong: treated as dropped, said here.
struct BadRouting : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

class ExpertParallel;
enum class PushBy : int;
struct Push;

// One dispatch between its send and the end of its combine.
struct DispatchHandle {
  // kCombined: closed, unless a refusal of the combine comes to light (where launches are queued).
  enum class Stage { kSent, kReceived, kCombineSent, kCombined, kClosed };

  const ExpertParallel* owner = nullptr;
  int buffer = 0;
  int num_tokens = 0;
  Layout layout = Layout::kRows;
  int expert_alignment = 1;
  DType row_dtype = DType::kBfloat16;
  std::atomic<Stage> stage = Stage::kSent;
  uint32_t attempt = 1;            // of the combine: a refused one may be tried again
  bool keeps_own_sums = false;     // the combine has left this rank's sums for itself in y
  bool is_refusal_raised = false;  // of the newest launch: each of its warps may report the refusal

  bool is_open() const { return stage < Stage::kCombined; }
};

// What is dispatched: addresses of this rank's tensors.
struct DispatchInput {
  int num_tokens = 0;
  TopkIdx topk_idx;
  const float* topk_weights = nullptr;
  Rows x;
  DType x_dtype = DType::kBfloat16;
  Rows x_scales;
  bool quantize = false;

  DType row_dtype() const { return quantize ? DType::kFloat8 : x_dtype; }  // as rows travel
};

// Where a launch goes.
struct LaunchPlace {
  int num_blocks = 0;  // 0: the launch table's, or the target's default
  void* stream = nullptr;
};

// Calls may come from several threads: each waits until the one before has ended. close() ends the wait of a call that
// another thread is in. Only the process that made the object may use it; a forked child lets go of its copy unharmed.
class ExpertParallel {
 public:
  ExpertParallel(const MoeConfig& config, const std::string& target, int device, double timeout_seconds);
  ~ExpertParallel();

  const MoeConfig& config() const { return context_.config; }
  const Device& device() const { return *device_; }
  int64_t max_quantized_row_bytes() const;
  const Workspace& workspace() const { return context_.ws; }
  size_t nbytes() const { return size_.symmetric_bytes + size_.local_bytes; }
  static size_t nbytes_for(const MoeConfig& config);

  // Set-up: every rank's handle to every rank, in rank order.
  CommHandle comm_handle() {
    may_be_mapped_ = true;
    return comm_handle_;
  }
  void connect(const std::vector<CommHandle>& handles);
  // When the object cannot be made: unmaps the peers; says that no peer maps this rank's memory, nor will.
  void disconnect();
  void give_back() { may_be_mapped_ = false; }

  // The steps. A handle is open from dispatch_send to the end of combine_recv, or release.
  std::shared_ptr<DispatchHandle> dispatch_send(const DispatchInput& input, const LaunchPlace& place);
  void dispatch_recv(DispatchHandle& handle, Layout layout, int expert_alignment, const LaunchPlace& place);
  // Positions of the handle's layout: the rows that expert_x and y have.
  int64_t num_positions(const DispatchHandle& handle) const;
  void gather_rows(const DispatchHandle& handle, void* expert_x, float* expert_x_scales, const LaunchPlace& place);
  void combine_send(DispatchHandle& handle, const Rows& y, int64_t num_y_rows, bool presummed,
                    const LaunchPlace& place);
  void combine_recv(DispatchHandle& handle, void* combined_x, const LaunchPlace& place);
  // Peers whose combine waits for this rank are told `why`.
  void release(DispatchHandle& handle, const LaunchPlace& place, const std::string& why = {});

  // Both halves, in one launch where launches are queued and the device holds a sender and a receiver at once.
  std::shared_ptr<DispatchHandle> dispatch(const DispatchInput& input, Layout layout, int expert_alignment,
                                           const LaunchPlace& place);
  void combine(DispatchHandle& handle, const Rows& y, int64_t num_y_rows, bool presummed, void* combined_x,
               const LaunchPlace& place);

  // How many blocks the launches take: what the place says, else the table, else the target's default.
  void set_launch_table(LaunchTable table) { launch_table_ = std::move(table); }
  int dispatch_blocks(int num_tokens, const LaunchPlace& place = {}) const {
    return blocks(place, launch_table_.dispatch_blocks(num_tokens));
  }
  int combine_blocks(int num_tokens, const LaunchPlace& place = {}) const {
    return blocks(place, launch_table_.combine_blocks(num_tokens));
  }

  // For benchmarks: row i goes where pushes[i] says, into a buffer that is not open, and nobody is told. All
  // ranks call it, with no dispatch or combine on its way.
  void push_rows(const Rows& x, int num_rows, int64_t row_bytes, const Push* pushes, PushBy by,
                 const LaunchPlace& place);

  // Says on every rank that this rank's call has failed; the caller then raises why.
  void refuse_dispatch(const std::string& why, const LaunchPlace& place);
  void refuse_combine(DispatchHandle& handle, const std::string& why, const LaunchPlace& place);
  // The same of every handle whose combine peers may wait for: when the call does not say which one is meant.
  void refuse_combines(const std::string& why, const LaunchPlace& place);
  // For a dispatch that this rank has launched and cannot go on with.
  void give_up_newest(const std::string& why, const LaunchPlace& place);
  // Dispatches so far, refused ones too: whether a call that has failed was launched.
  uint64_t num_dispatches() const { return num_dispatches_; }

  // Raises what the kernels have reported so far: a wait that was given up, or bad routing. check() first waits for the
  // device. Calls on the hot path raise waits only: a call is not to blame for the routing of an earlier one.
  void raise_reported();
  void check();
  // No call after this one; a call of another thread that waits leaves with an error. The memory goes with the object:
  // views of it may still be held. In a forked child nothing happens.
  void close();
  bool is_closed() const { return closed_ || closing_; }

  // A turn is held while the tracer is used.
  Tracer& tracer() { return tracer_; }
  [[nodiscard]] CallGate::Turn enter() { return gate_.enter(); }
  void require_own_process() const { gate_.require_own_process(); }

  // Raises unless the handle is open, ours, and at one of the two stages.
  void require(const DispatchHandle& handle, DispatchHandle::Stage stage, DispatchHandle::Stage or_stage,
               const char* call) const;
  void require_open() const;
  bool is_connected() const { return connected_; }
  // Whether an address lies in the memory of this object.
  bool owns(const void* address) const;

 private:
  // What a launch is given: the trace may have been switched since the one before.
  Context context() const {
    Context now = context_;
    now.wait.trace = comm_.wait.trace;
    return now;
  }
  void allocate(const std::string& target, double timeout_seconds);
  int next_buffer();
  void take(int buffer, const std::shared_ptr<DispatchHandle>& handle);
  std::shared_ptr<DispatchHandle> make_handle(const DispatchInput& input, int buffer) const;
  DispatchSendArgs send_args(const DispatchInput& input, int buffer) const;
  CombineSendArgs send_args(const DispatchHandle& handle, const Rows& y, int64_t num_y_rows, bool presummed) const;
  CombineRecvArgs recv_args(const DispatchHandle& handle, void* combined_x) const;
  void finish_combine(DispatchHandle& handle);
  int blocks(const LaunchPlace& place, int by_table) const;
  bool launches_halves() const;
  void after_launch();
  void part();
  void leave_if_interrupted();
  void poison_peers();
  bool is_known_refusal(const Report& report);
  bool nobody_waits() const;
  void raise_waits();
  void raise_bad_routing();

  std::unique_ptr<Device> device_;
  CommContext comm_;
  Context context_;
  Tracer tracer_{*device_, comm_};
  RegionSize size_;
  HeapView* device_heap_ = nullptr;  // the communicator's heap where kernels can read it
  CommHandle comm_handle_;
  std::byte* own_heap_ = nullptr;
  std::byte* local_ = nullptr;
  Report* report_ = nullptr;
  ErrorCounters raised_;                               // what of the counters has been raised
  std::vector<std::shared_ptr<DispatchHandle>> open_;  // per buffer, null when free
  std::vector<std::weak_ptr<DispatchHandle>> newest_;  // per buffer: the handle that had it last
  int last_buffer_;
  std::atomic<uint64_t> num_dispatches_ = 0;
  LaunchTable launch_table_;
  double timeout_seconds_;
  CallGate gate_{"ExpertParallel"};
  std::atomic<bool> connected_ = false;
  std::atomic<bool> closing_ = false;  // close() has been called: calls that wait leave
  std::atomic<bool> closed_ = false;
  bool interrupted_ = false;  // a call was left in its middle: the peers have been told
  // Whether a peer may write into this memory: from the time that its handle is out until all ranks have closed.
  std::atomic<bool> may_be_mapped_ = false;

  // How long a close waits for the other ranks to close.
  static constexpr double kPartingSeconds = 5.0;
};

}  // namespace moe_a2a
