// One argument struct per kernel, filled by the runtime with designated initialisers and passed by value.
#pragma once

#include <cstddef>
#include <cstdint>

#include "moe/context.h"
#include "rows/row_layout.h"

namespace moe_a2a {

// The caller's routing, int32 or int64, contiguous.
struct TopkIdx {
  const void* data = nullptr;  // [num_tokens, num_topk]
  bool is_int64 = false;

  MOE_A2A_HOST_DEVICE const void* at(int64_t i) const {
    return static_cast<const std::byte*>(data) + i * (is_int64 ? sizeof(int64_t) : sizeof(int32_t));
  }
  MOE_A2A_HOST_DEVICE int64_t operator[](int64_t i) const {
    return is_int64 ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

struct DispatchSendArgs {
  Context context;
  int buffer = 0;
  uint64_t number = 0;  // of the dispatch, as the hosts count them; 0: no peer is asked whether it has a buffer
  int num_tokens = 0;
  TopkIdx topk_idx;
  const float* topk_weights = nullptr;  // [num_tokens, num_topk], or null: 1
  Rows x;
  DType x_dtype = DType::kBfloat16;
  Rows x_scales;            // of float8 rows: [num_tokens, ceil(hidden / 128)] fp32
  bool quantize = false;    // x_dtype rows leave as float8 rows with scales
  bool vector_rows = true;  // x may be read in 16-byte vectors
};

// How the routes of the experts are laid on one line of positions.
enum class Layout : int { kRows, kExpertMajor, kMasked };

struct DispatchRecvArgs {
  Context context;
  int buffer = 0;
  Layout layout = Layout::kRows;
  int expert_alignment = 1;
  DType row_dtype = DType::kBfloat16;  // of the rows that come
};

// Copies landed rows to where a caller wants them: one row per position of the layout, zeros in the padding.
struct GatherRowsArgs {
  Context context;
  int buffer = 0;
  Layout layout = Layout::kExpertMajor;
  DType row_dtype = DType::kBfloat16;
  int64_t num_positions = 0;
  std::byte* expert_x = nullptr;     // [positions, hidden]
  float* expert_x_scales = nullptr;  // [positions, ceil(hidden / 128)], of float8 rows
};

// Both halves in one launch: the first blocks send, the others receive at the same time.
struct DispatchArgs {
  DispatchSendArgs send;
  DispatchRecvArgs recv;
  int num_send_blocks = 0;
};

struct CombineSendArgs {
  Context context;
  int buffer = 0;
  Rows y;  // one row per position of the layout, or per landed row when `presummed`
  int64_t num_y_rows = 0;
  bool presummed = false;
  bool is_sent = false;     // by an earlier attempt: nothing travels again; own sums that are kept lie in y
  bool vector_rows = true;  // y may be read in 16-byte vectors
};

struct CombineRecvArgs {
  Context context;
  int buffer = 0;
  int num_tokens = 0;
  uint32_t attempt = 1;
  SeenStrays seen;
  std::byte* combined_x = nullptr;  // [num_tokens, hidden]
  bool vector_rows = true;

  MOE_A2A_HOST_DEVICE Refusal refusal_of(int rank) const {
    return {context.region.combine_refusal.at(buffer, rank), attempt, seen.of_rank[rank]};
  }
};

struct CombineArgs {
  CombineSendArgs send;
  CombineRecvArgs recv;
  int num_send_blocks = 0;
};

// A rank that will not take part in this epoch says so instead of keeping its peers waiting.
struct RefuseDispatchArgs {
  Context context;
  int buffer = 0;
  uint64_t number = 0;  // as in DispatchSendArgs
  RefusalText text;
};
// All of its buffers are open, so that it cannot tell which one its peers have taken.
struct RefuseAnyBufferArgs {
  Context context;
  uint64_t number = 0;
  RefusalText text;
};
struct RefuseCombineArgs {
  Context context;
  int buffer = 0;
  uint32_t count = 1;  // a RefusalCount
  RefusalText text;
};

// The buffer's rows are no longer read: gives the credit back without a combine, and refuses one for good, since peers
// may already wait for this rank's sums.
struct ReleaseArgs {
  Context context;
  int buffer = 0;
  RefusalText text;  // empty: that of an earlier refusal stands
};

}  // namespace moe_a2a
