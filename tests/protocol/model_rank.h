// A rank under exploration: the real kernels on a real MoeRegion, launched as csrc/moe launches them, and checks of
// their results. Every value is a formula of source rank, token, call and column, so a misplaced row names its origin.
#pragma once

#include <array>
#include <functional>
#include <initializer_list>
#include <vector>

#include "explored_rank.h"
#include "moe/experts/simulated_experts_args.h"
#include "moe/wires.h"

namespace moe_a2a {

// The choices [token][k] of a rank's n-th call; a call may have no tokens.
using Routing = std::function<std::vector<std::vector<int32_t>>(int rank, int call)>;

struct Shape {
  int num_ranks = 2;
  int num_max_tokens = 1;
  int num_topk = 1;
  int num_experts = 2;
  int hidden = 5;  // one vector of four plus one element
  int num_buffers = 1;
  int num_blocks = 1;
  int num_calls = 2;
  int num_max_ll_tokens = 0;
  int max_ll_row_tokens = kMaxTokensPerRank, max_ll_sum_tokens = kMaxTokensPerRank;
  uint64_t first_epoch = 0;                      // uses of the buffers before the first call
  bool presummed = false;                        // the caller of combine weights and sums
  bool coded = false;                            // sums travel in a line codec in every second call
  bool simulated = false;                        // combine reads the landed rows, not what the experts store
  int call_of_float8 = -1;                       // in which only rank 1 dispatches float8 rows
  std::function<int(int rank, int call)> bound;  // of the tokens of a rank's batch in that call; null: num_max_tokens
  Routing routing;
};

MoeConfig config_of(const Shape& shape, int rank);
// Of the communicator's region and the MoE region after it.
RegionSize size_of(const Shape& shape);

// Names by which mutants distinguish launches: of a small or medium batch, or launches in which all other ranks' are.
inline constexpr const char* kSmallSend = "dispatch_send of a small batch";
inline constexpr const char* kSmallRecv = "dispatch_recv of small batches";
inline constexpr const char* kMediumSend = "dispatch_send of a medium batch";
inline constexpr const char* kMediumRecv = "dispatch_recv of medium batches";

inline constexpr int kTilesOfARow = 2;  // of a product that sends its rows

class ModelRank : public ExploredRank {
 public:
  // `symmetric` holds the heaps of all ranks, one after another.
  ModelRank(const Shape& shape, int rank, std::byte* symmetric, std::byte* local, Reports* reports);

  void reset();  // memory as after `first_epoch` uses of every buffer
  const MoeRegion& region() const { return context_.region; }
  const float* y() const { return y_; }
  const uint32_t* stored_tiles() const { return stored_tiles_; }

  // ---- launches. Call n of every rank uses buffer n % num_buffers.
  Launch dispatch_send(int call);
  Launch dispatch_recv(int call);
  Launch experts(int call);  // checks what has landed, computes y
  Launch combine_send(int call);
  Launch combine_recv(int call);
  Launch check_combined(int call);
  // Replaces experts() and combine_send(): one block multiplies, in two tiles, while another sends.
  Launch zero_counts(int call);
  Launch product_combine_send(int call);
  Launch dispatch(int call);  // both halves in one launch
  Launch combine(int call);
  Launch release(int call);
  Launch refuse_dispatch(int call);
  Launch refuse_combine(int call, uint32_t attempt);
  Launch goodbye();
  Launch align_clocks();

  Launch expect_refusal(int peer, bool check_text = true);  // reported by the previous launch, with its text
  Launch note_refusal(int peer);        // the same if the combine may end before it observes the refusal
  Launch combine_recv_again(int call);  // after a noted refusal
  Launch expect_left(int culprit);      // the previous launch gave up because of `culprit`
  Launch watch_report(int culprit);     // a host thread that polls while kernels run
  Launch check_clocks() {
    return launch("check_clocks", -1, 1, [this](int) { compare_clocks(); });
  }
  Launch reuse_heap();  // as the next owner of this memory would

  // The ranks' clocks differ; those of the host threads, which come after the ranks, are never read.
  static uint64_t clock_offset(int rank) { return static_cast<uint64_t>(rank) * rank << 50; }

 private:
  struct Input {
    std::vector<std::vector<int32_t>> choices;
    std::vector<int32_t> topk_idx;
    std::vector<float> topk_weights, x;
  };
  const Input& input(int rank, int call) const { return inputs_[call * shape_.num_ranks + rank]; }
  int num_tokens(int rank, int call) const { return static_cast<int>(input(rank, call).choices.size()); }
  int num_tokens(int call) const { return num_tokens(rank(), call); }
  template <class Batch>
  bool is(int rank, int call) const {
    return moe_a2a::is<Batch>(context_.config, num_tokens(rank, call), DType::kFloat32);
  }
  template <class Batch>
  bool all_others_are(int call) const {
    bool all = true;
    for (int r = 0; r < shape_.num_ranks; ++r) all &= r == rank() || is<Batch>(r, call);
    return all;
  }
  bool sums_return_ll(int call) const;
  int buffer(int call) const { return call % shape_.num_buffers; }
  int bound(int call) const { return shape_.bound ? shape_.bound(rank(), call) : shape_.num_max_tokens; }
  Context context(int call) const { return context_.with_bound(bound(call)); }
  RowFormat format(int call) const {
    return rank() == 1 && call == shape_.call_of_float8 ? RowFormat::kFloat8 : RowFormat::kPlain;
  }
  bool is_coded(int call) const { return shape_.coded && call % 2 == 0; }
  ExpertScales scales() const {
    return {.data = reinterpret_cast<const std::byte*>(scales_.data()), .stride = sizeof(float)};
  }
  DispatchSendArgs dispatch_send_args(int call) const;
  DispatchRecvArgs dispatch_recv_args(int call) const;
  CombineSendArgs combine_send_args(int call) const;
  CombineRecvArgs combine_recv_args(int call);

  void reset_ll_words();
  void raise_early(std::initializer_list<Field> fields, int call) const;
  std::vector<float> outputs(int call) const;
  void store_tiles(int call);
  void check_row(int src, int token, int call, const float* row) const;
  void compare_combined(int call) const;
  void take_refusal(int peer, bool check_text);
  void compare_clocks() const;

  Shape shape_;
  Context context_;
  std::vector<Input> inputs_;
  std::array<std::vector<std::max_align_t>, 4> shared_;  // per block
  float* y_;                // [routes, hidden], and the counts of its tiles: in the explored memory, so that races show
  uint32_t* stored_tiles_;  // [routes]
  std::vector<float> scales_;  // of the local experts
  std::vector<float> combined_;
  uint32_t attempt_ = 1;
  bool noted_refusal_ = false;
};

}  // namespace moe_a2a
