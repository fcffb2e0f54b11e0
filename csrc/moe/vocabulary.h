// Names of the MoE kernels in reports and traces.
#pragma once

#include "comm/vocabulary.h"

namespace moe_a2a {

namespace moe_op {
inline constexpr Operation kDispatchSend{16}, kDispatchRecv{17}, kCombineSend{18}, kCombineRecv{19}, kGroupedGemm{30};
}
inline constexpr const char* kMoeOperations[] = {
    "dispatch_send",  "dispatch_recv",     "combine_send",      "combine_recv",         "dispatch",
    "combine",        "gather_rows",       "refuse_dispatch",   "refuse_combine",       "release",
    "push_rows",      "refuse_any_buffer", "simulated_experts", "product_combine_send", "grouped_gemm",
    "weighted_grads", "recv_topk",         "topk_layout",       "term_weights"};

namespace moe_kind {
inline constexpr TraceKind kRoute{8},  // a chunk of the routing table: read, written, signalled; token: its first
    kCreditWait{9},                    // for `peer` to stop reading this buffer
    kTableWait{10},                    // for the routing table of `peer`
    kRowWait{11},                      // for a row of `peer`
    kPartialWait{12},                  // for the sum that `peer` owes for a token
    kLists{13},                        // the expert lists are built
    kSum{14},                          // the outputs of the local experts are summed into the memory of `peer`
    kGather{15},                       // a row is copied to its expert's positions; peer and token: its source
    kTile{16},                         // a tile of a local expert's product; token: the expert, polls: the tile's rows
    kStoredWait{17},                   // for the tiles of a row of `token` that its sum needs
    kOtherRows{23};  // only in reports: the batch of `peer` is of another kind; token: both (see refuse_rows())
}
inline constexpr SliceName kMoeKinds[] = {{"route"},
                                          {"credit_wait", "credit"},
                                          {"table_wait", "routing table"},
                                          {"row_wait", "row", true},
                                          {"partial_wait", "partial sum", true},
                                          {"lists"},
                                          {"sum"},
                                          {"gather"},
                                          {"tile"},
                                          {"stored_wait"}};

inline constexpr Vocabulary kMoeVocabulary{.client = "ExpertParallel",
                                           .memory_advice = "pass a smaller num_max_tokens_per_rank or num_buffers",
                                           .first_operation = moe_op::kDispatchSend,
                                           .operations = kMoeOperations,
                                           .first_kind = moe_kind::kRoute,
                                           .kinds = kMoeKinds};
static_assert(kMoeVocabulary.operation_named("combine_recv") == moe_op::kCombineRecv);
static_assert(kMoeVocabulary.operation_named("grouped_gemm") == moe_op::kGroupedGemm);
static_assert(std::string_view(kMoeVocabulary.name_of(moe_kind::kStoredWait)->name) == "stored_wait");

}  // namespace moe_a2a
