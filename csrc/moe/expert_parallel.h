// The host object: owns the memory, hands out buffers, launches the kernels, turns a report into an exception.
// Knows nothing of PyTorch: tensors arrive as addresses and strides, already checked by the caller.
#pragma once

#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
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
  // Of the combine; one that was refused may be tried again. See RefusalCount.
  uint32_t attempt = 1;
  uint32_t failed_attempt = 0;  // the newest that failed on this rank
  uint32_t num_strays = 0;
  SeenStrays seen;
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

class ExpertParallel : public Client {
 public:
  // The rank and the number of ranks of `config` are the communicator's.
  ExpertParallel(std::shared_ptr<Communicator> comm, const MoeConfig& config);

  const MoeConfig& config() const { return context_.config; }
  Communicator& communicator() { return *comm_; }
  int64_t max_quantized_row_bytes() const;
  const MoeRegion& region() const { return context_.region; }
  static size_t nbytes_for(const MoeConfig& config);

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

  // Also bad routing. Calls on the hot path raise waits only: a call is not to blame for the routing of an earlier one.
  void raise_reported() override;

  // Raises unless the handle is open, ours, and at one of the two stages.
  void require(const DispatchHandle& handle, DispatchHandle::Stage stage, DispatchHandle::Stage or_stage,
               const char* call) const;

 private:
  int find_buffer(const LaunchPlace& place);  // -1: all are open
  int next_buffer(const LaunchPlace& place);
  uint64_t awaited_number() const;
  void pass_without_buffer();
  void refuse_any_buffer(const std::string& why, const LaunchPlace& place);
  void take(int buffer, const std::shared_ptr<DispatchHandle>& handle);
  std::shared_ptr<DispatchHandle> make_handle(const DispatchInput& input, int buffer) const;
  DispatchSendArgs send_args(const DispatchInput& input, int buffer) const;
  CombineSendArgs send_args(const DispatchHandle& handle, const Rows& y, int64_t num_y_rows, bool presummed) const;
  CombineRecvArgs recv_args(const DispatchHandle& handle, void* combined_x) const;
  void finish_combine(DispatchHandle& handle);
  void note_refusal(DispatchHandle& handle, int peer, uint32_t count) const;
  void send_refusal(const DispatchHandle& handle, const std::string& why, const LaunchPlace& place);
  int blocks(const LaunchPlace& place, int by_table) const;
  bool launches_halves() const;
  void after_launch();
  bool is_known_refusal(const Report& report) override;
  void raise_bad_routing();
  void after_close() override;

  std::shared_ptr<Communicator> comm_;
  Context context_;
  ErrorCounters raised_;                               // what of the counters has been raised
  std::vector<std::shared_ptr<DispatchHandle>> open_;  // per buffer, null when free
  std::vector<std::weak_ptr<DispatchHandle>> newest_;  // per buffer: the handle that had it last
  int last_buffer_;
  std::weak_ptr<DispatchHandle> newest_dispatch_;  // null: it was refused
  std::atomic<uint64_t> num_dispatches_ = 0;       // calls that were made, refused ones too
  LaunchTable launch_table_;
};

}  // namespace moe_a2a
