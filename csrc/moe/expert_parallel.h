// The host object: owns the memory, launches the kernels, turns reports into exceptions. Independent of PyTorch:
// tensors arrive as addresses and strides that the caller has checked.
#pragma once

#include <initializer_list>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "moe/args.h"
#include "moe/buffer_ring.h"
#include "moe/experts/product_trace.h"
#include "moe/experts/simulated_experts_args.h"
#include "moe/launch_table.h"

namespace moe_a2a {

// Bad routing that only the kernels could see. They treated it as dropped; this reports it.
struct BadRouting : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

enum class PushBy : int;
struct Push;

// What is dispatched: addresses of this rank's tensors.
struct DispatchInput {
  int num_tokens = 0;
  int num_max_tokens_per_rank = 0;  // see MoeConfig::with_bound(); 0: the object's
  TopkIdx topk_idx;
  const float* topk_weights = nullptr;
  Rows x;
  Rows x_scales;
  RowFormat format = RowFormat::kPlain;
  bool quantize = false;
};

// What is combined: one row per position of the handle's layout, or per landed row if presummed; or what simulated
// experts make of the landed rows.
struct CombineInput {
  Rows y;
  int64_t num_y_rows = 0;
  bool presummed = false;
  LineCodec codec = LineCodec::kNone;
  const int32_t* sum_index = nullptr;     // see CombineSendArgs
  std::optional<ExpertScales> simulated;  // in place of y
};

// Rows as they were combined, and their weights: one per position.
struct WeightedRows {
  Rows rows;
  const float* weights = nullptr;
  int64_t num_rows = 0;
};

// Where a launch runs.
struct LaunchPlace {
  int num_blocks = 0;  // 0: from the launch table, else the target's default
  void* stream = nullptr;
};

class ExpertParallel : public Client {
 public:
  using Stage = DispatchHandle::Stage;

  // `config` must have the communicator's rank and num_ranks.
  ExpertParallel(std::shared_ptr<Communicator> comm, const MoeConfig& config);

  const MoeConfig& config() const { return context_.config; }
  Communicator& communicator() { return *comm_; }
  int64_t max_quantized_row_bytes() const;
  const MoeRegion& region() const { return context_.region; }
  static size_t nbytes_for(const MoeConfig& config);

  // The steps. A handle is open from dispatch_send until the end of combine_recv or release.
  std::shared_ptr<DispatchHandle> dispatch_send(const DispatchInput& input, const LaunchPlace& place);
  void dispatch_recv(DispatchHandle& handle, Layout layout, int expert_alignment, const LaunchPlace& place);
  // The sizes of a handle's batch: num_max_tokens_per_rank is that of its dispatch.
  MoeConfig config_of(const DispatchHandle& handle) const {
    return config().with_bound(handle.num_max_tokens_per_rank);
  }
  // Positions of the handle's layout: the number of rows of expert_x and y.
  int64_t num_positions(const DispatchHandle& handle) const;
  void gather_rows(const DispatchHandle& handle, void* expert_x, float* expert_x_scales, bool scales_by_column,
                   const LaunchPlace& place);
  // The caller sets what to return and where to; see RecvTopkArgs.
  void recv_topk(const DispatchHandle& handle, RecvTopkArgs args, const LaunchPlace& place);
  // Before a combine, of a handle whose dispatch carried the number of each choice as its weight: the weights of every
  // rank's tokens, [R * T, K].
  void set_term_weights(const DispatchHandle& handle, const float* weights, const LaunchPlace& place);
  // In combine's backward pass, after a dispatch of the gradients of its sums: one row per position, num_rows of them.
  // All tensors are contiguous; see WeightedGradsArgs.
  void weighted_grads(const DispatchHandle& handle, const WeightedRows& y, void* grad_y, float* grad_weights,
                      const LaunchPlace& place);
  // For a presummed combine: for each row of recv_x, the weighted sum of its copies as scaled by its local experts.
  void simulated_experts(const DispatchHandle& handle, const ExpertScales& scales, void* sums,
                         const LaunchPlace& place);
  void combine_send(DispatchHandle& handle, const CombineInput& input, const LaunchPlace& place);
  void combine_recv(DispatchHandle& handle, void* combined_x, const LaunchPlace& place);
  // Replaces combine_send: one launch multiplies and sends the sums of the product's rows.
  // `product.out` is y, its `expert_offsets` are the handle's; place.num_blocks counts the blocks that send too.
  void product_combine_send(DispatchHandle& handle, const GroupedGemmArgs& product, const LaunchPlace& place);
  // A product of this object's experts; uses only its trace. `expert_offsets` are a handle's.
  void run_product(const GroupedGemmPlace& place, const GroupedGemmArgs& args);
  // Not in the masked layout, nor if this rank's batch is so small that its sums may return as LL words.
  bool can_send_with_product(const DispatchHandle& handle) const;
  // Peers that wait in combine for this rank raise `why`.
  void release(DispatchHandle& handle, const LaunchPlace& place, const std::string& why = {});

  // Both halves; in one launch where launches are queued and a sender and a receiver can be resident at once.
  std::shared_ptr<DispatchHandle> dispatch(const DispatchInput& input, Layout layout, int expert_alignment,
                                           const LaunchPlace& place);
  void combine(DispatchHandle& handle, const CombineInput& input, void* combined_x, const LaunchPlace& place);

  // Block counts: those of `place`, else the table's, else the target's default.
  void set_launch_table(LaunchTable table) { launch_table_ = std::move(table); }
  int dispatch_blocks(int num_tokens, const LaunchPlace& place = {}) const {
    return blocks(place, launch_table_.dispatch_blocks(num_tokens));
  }
  int combine_blocks(int num_tokens, const LaunchPlace& place = {}) const {
    return blocks(place, launch_table_.combine_blocks(num_tokens));
  }

  // For benchmarks: sends row i as pushes[i] says, into a buffer that is not open, without signalling. Collective; no
  // dispatch or combine may be in progress.
  void push_rows(const Rows& x, int num_rows, int64_t row_bytes, const Push* pushes, PushBy by,
                 const LaunchPlace& place);

  // Tells every rank that this rank's call has failed; the caller then throws.
  void refuse_dispatch(const std::string& why, const LaunchPlace& place);
  // Null, or a handle that is not open here: the call does not say which combine the peers wait for, so that of every
  // received handle is refused.
  void refuse_combine(DispatchHandle* handle, const std::string& why, const LaunchPlace& place);
  // For a dispatch that this rank has launched but cannot complete.
  void give_up_newest(const std::string& why, const LaunchPlace& place);
  // Dispatches so far, including refused ones. Tells whether a failed call was launched.
  uint64_t num_dispatches() const { return buffers_.num_dispatches(); }

  std::vector<Tracer*> tracers() override { return {&tracer(), &product_trace_.tracer()}; }

  // Also throws for bad routing. Calls on the hot path throw only for failed waits: the routing of earlier calls is not
  // their error.
  void raise_reported() override;
  void raise_in_own_words(const Report& report) override;

  // Throws unless this object is open and the handle its own.
  void require_own(const DispatchHandle& handle, const char* call) const;
  // The same, and unless the handle is at one of these stages.
  void require(const DispatchHandle& handle, std::initializer_list<Stage> stages, const char* call) const;

 private:
  int find_buffer(const LaunchPlace& place);  // -1: all are open
  int next_buffer(const LaunchPlace& place);
  // The hosts do not count the replays of captured graphs.
  DispatchNumber for_kernels(const DispatchNumber& number, const LaunchPlace& place) const {
    return device_->is_capturing(place.stream) ? DispatchNumber{} : number;
  }
  void refuse_any_buffer(const std::string& why, const LaunchPlace& place);
  std::shared_ptr<DispatchHandle> make_handle(const DispatchInput& input, int buffer) const;
  Context context_of(const DispatchHandle& handle) const { return context_.with_bound(handle.num_max_tokens_per_rank); }
  DispatchSendArgs send_args(const DispatchInput& input, const DispatchHandle& handle, const LaunchPlace& place) const;
  CombineSendArgs send_args(const DispatchHandle& handle, const CombineInput& input) const;
  DispatchRecvArgs recv_args(const DispatchHandle& handle, const DispatchNumber& number) const;
  CombineRecvArgs recv_args(const DispatchHandle& handle, void* combined_x, const LaunchPlace& place) const;
  void keep_own_sums(DispatchHandle& handle, const CombineSendArgs& send);
  void finish_combine(DispatchHandle& handle);
  void refuse_combines(const std::string& why, const LaunchPlace& place);
  void send_refusal(const DispatchHandle& handle, const std::string& why, const LaunchPlace& place);
  int blocks(const LaunchPlace& place, int by_table) const;
  int combine_blocks(int num_tokens, const CombineInput& input, const LaunchPlace& place) const;
  int independent_blocks(const LaunchPlace& place) const;
  // A launch that waits for no rank.
  template <class Args>
  void launch_alone(const Args& args, const LaunchPlace& place) {
    launch(args, independent_blocks(place), place.stream);
    leave_if_signalled();
  }
  bool launches_halves() const;
  bool allows_vectors(const Rows& rows) const;  // 16-byte loads and stores
  bool allows_vectors(const ExpertScales& scales) const {
    return !scales.per_column || allows_vectors(Rows{scales.data, scales.stride});
  }
  void after_launch();
  bool is_known_refusal(const Report& report) override { return buffers_.is_known(report); }
  void raise_bad_routing();
  void after_close() override;

  std::shared_ptr<Communicator> comm_;
  Context context_;
  ProductTrace product_trace_;
  ErrorCounters raised_;  // counts that have been raised already
  BufferRing buffers_;
  LaunchTable launch_table_;
};

}  // namespace moe_a2a
