// One argument struct per kernel, filled by the host with designated initialisers and passed by value.
#pragma once

#include <cstddef>
#include <cstdint>

#include "comm/signal.h"
#include "moe/batch_header.h"
#include "moe/context.h"
#include "rows/line_codec.h"
#include "rows/row_layout.h"

namespace moe_a2a {

// The caller's routing: int32 or int64, contiguous.
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

// A dispatch's number, counted by the hosts. A rank without a free buffer refuses a dispatch by its number.
struct DispatchNumber {
  uint64_t number = 0;  // 0: not counted, since a captured graph may replay it; no such refusal ends its waits
  uint32_t since = 0;   // dispatches since this buffer's previous one
};

// What a credit says about the dispatch whose buffer it gives back.
struct CreditNote {
  static constexpr int kRefusedBits = 15;
  static constexpr uint32_t kMostRefused = (1u << kRefusedBits) - 1;

  uint32_t since = 0;    // its DispatchNumber::since; a payload has room for the lowest bits
  uint32_t refused = 0;  // how many dispatches later, at most kMostRefused, this rank last refused one for lack of a
                         // buffer; 0: not since

  MOE_A2A_HOST_DEVICE uint32_t payload() const { return (since << kRefusedBits | refused) & Signal::kPayloadMask; }
  MOE_A2A_HOST_DEVICE static uint32_t refused_in(uint32_t payload) { return payload & kMostRefused; }
  // Whether the credit may be of a dispatch with this number.
  MOE_A2A_HOST_DEVICE static bool may_be_of(uint32_t payload, const DispatchNumber& number) {
    return ((payload ^ number.since << kRefusedBits) & Signal::kPayloadMask & ~kMostRefused) == 0;
  }
};

struct DispatchSendArgs {
  Context context;
  int buffer = 0;
  DispatchNumber number;
  int num_tokens = 0;
  TopkIdx topk_idx;
  const float* topk_weights = nullptr;  // [num_tokens, num_topk]; null: all 1
  Rows x;
  Rows x_scales;  // of float8 x: [num_tokens, ceil(hidden / 128)] fp32, or four bytes in place of each
  RowFormat format = RowFormat::kPlain;
  bool quantize = false;    // x is of the object's dtype, and travels as float8
  bool vector_rows = true;  // x allows 16-byte vector loads

  MOE_A2A_HOST_DEVICE DType row_dtype() const { return context.config.row_dtype(format); }
  MOE_A2A_HOST_DEVICE DType x_dtype() const { return quantize ? context.config.dtype : row_dtype(); }
  MOE_A2A_HOST_DEVICE uint32_t header() const { return BatchHeader::pack(context.config, num_tokens, format); }
};

// How the routes of the local experts are laid out in positions.
enum class Layout : int { kRows, kExpertMajor, kMasked };

struct DispatchRecvArgs {
  Context context;
  int buffer = 0;
  uint64_t number = 0;  // of the dispatch, for the report of its refusal; 0: in a captured graph
  Layout layout = Layout::kRows;
  int expert_alignment = 1;
  RowFormat format = RowFormat::kPlain;  // of this rank's batch, and so of every rank's

  MOE_A2A_HOST_DEVICE DType row_dtype() const { return context.config.row_dtype(format); }
};

// Copies landed rows into the caller's tensor: one row per position of the layout, zeros in the padding; in
// Layout::kRows each to its row of recv_x.
struct GatherRowsArgs {
  Context context;
  int buffer = 0;
  Layout layout = Layout::kExpertMajor;
  DType row_dtype = DType::kBfloat16;
  int64_t num_positions = 0;
  std::byte* expert_x = nullptr;     // [positions, hidden]
  float* expert_x_scales = nullptr;  // for float8 rows: [positions, S = ceil(hidden / 128)]
  bool scales_by_column = false;     // in the masked layout: [local experts, S, rows] instead
};

// The local experts of landed rows, and their weights: of all rows of recv_x, each row's experts without gaps; or of
// `packed` rows, those that hold a token, each expert in the column of its choice.
struct RecvTopkArgs {
  Context context;
  int buffer = 0;
  bool packed = false;
  bool wide_ids = true;      // ids are int64, else int32
  int64_t num_rows = 0;      // of ids and weights
  int64_t first_expert = 0;  // the id of the first local expert
  int64_t no_expert = -1;    // the id where there is none
  // In place of no_expert, if there are several ranks: the ids of the other ranks' experts in turn, for global ids.
  // With one id for all of them, a kernel that counts the rows of each id would count these at one address.
  bool others_in_turn = false;
  void* ids = nullptr;       // [num_rows, K]
  float* weights = nullptr;  // [num_rows, K]; zeros where there is no expert
  // Of packed rows.
  int64_t* row_index = nullptr;  // [num_rows]: the row of recv_x, R * T where there is none
  int32_t* sum_index = nullptr;  // [R * T]: the packed row of each landed row, for the combine
  int32_t* numbers = nullptr;    // [R + El]: rows that landed from the ranks up to each; each local expert's routes
};

// Replaces the number of a choice, which each term of a landed row carries as its weight, by the weight of that choice.
struct TermWeightsArgs {
  Context context;
  int buffer = 0;
  const float* weights = nullptr;  // [R * T, K]: of every rank's tokens
};

// The gradients of y and of its weights, in combine's backward pass; see moe/weighted_grads.h.
struct WeightedGradsArgs {
  Context context;
  int buffer = 0;
  int64_t num_positions = 0;       // rows of y; those past the last route get zeros
  Rows y;                          // [positions, hidden]
  const float* weights = nullptr;  // [positions]
  std::byte* grad_y = nullptr;     // [positions, hidden]
  float* grad_weights = nullptr;   // [positions]
  bool vector_rows = true;         // y and grad_y allow 16-byte vectors
};

// Both halves in one launch: the first num_send_blocks blocks send while the others receive.
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
  bool is_sent = false;     // by an earlier attempt: nothing is sent again; own sums, if kept, are in y
  bool y_in_heap = false;   // as recv_x: once this returns the credit, peers may write there
  CreditNote note;          // of the credit that this returns
  bool vector_rows = true;  // y allows 16-byte vector loads
  // For packed sums: the row of y that holds each landed row's sum, [R * T]; null: the landed row's own.
  const int32_t* sum_index = nullptr;

  // The caller's sum of a landed row.
  MOE_A2A_HOST_DEVICE const std::byte* given_sum(int row) const {
    return y[sum_index == nullptr ? row : sum_index[row]];
  }
  // See combine/own_sums.h. Only rows of whole dwords: combine_recv reads them like rows that have travelled.
  MOE_A2A_HOST_DEVICE bool can_keep_own_sums() const {
    return presummed && !y_in_heap && vector_rows && context.config.row_bytes(context.config.dtype) % 4 == 0;
  }
};
// Sums that travel to other ranks as whole rows are coded.
struct CodedCombineSendArgs : CombineSendArgs {
  LineCodec codec = LineCodec::kNone;

  MOE_A2A_HOST_DEVICE LineCodec codec_to(int rank) const {
    return rank == context.heap.rank ? LineCodec::kNone : codec;
  }
};

struct CombineRecvArgs {
  Context context;
  int buffer = 0;
  int num_tokens = 0;
  uint64_t number = 0;  // of the dispatch, for the report of a refusal; 0: in a captured graph
  uint32_t attempt = 1;
  SeenStrays seen;
  std::byte* combined_x = nullptr;  // [num_tokens, hidden]
  bool vector_rows = true;

  MOE_A2A_HOST_DEVICE Refusal refusal_of(int rank) const {
    return {context.region.combine_refusal.at(buffer, rank), attempt, seen.of_rank[rank], number};
  }
};

// Both halves in one launch, for each kind of the first.
template <class SendArgs>
struct BothCombineArgs {
  SendArgs send;
  CombineRecvArgs recv;
  int num_send_blocks = 0;
};

// For a rank that will not take part in this epoch: it tells its peers, so that they do not wait.
struct RefuseDispatchArgs {
  Context context;
  int buffer = 0;
  DispatchNumber number;
  RefusalText text;
};
// For a rank whose buffers are all open: it cannot know which one its peers have taken.
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

// Gives the credit back without a combine: the buffer's rows are no longer read. Also refuses the combine for good,
// since peers may already wait for this rank's sums.
struct ReleaseArgs {
  Context context;
  int buffer = 0;
  CreditNote note;
  RefusalText text;  // empty: keep the text of an earlier refusal
};

}  // namespace moe_a2a
