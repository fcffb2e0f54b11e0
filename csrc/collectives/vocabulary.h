// The names of the collectives in reports and traces.
#pragma once

#include "comm/vocabulary.h"

namespace moe_a2a {

namespace collective_op {
inline constexpr Operation kOneShot{48}, kTwoShot{49}, kReduceScatter{50}, kAllGather{51}, kRefuse{52}, kRing{53},
    kRecursiveDoubling{54}, kDirectAllReduce{55}, kDirectReduceScatter{56}, kDirectAllGather{57};
}
inline constexpr const char* kCollectiveOperations[] = {"one_shot_all_reduce",
                                                        "two_shot_all_reduce",
                                                        "reduce_scatter",
                                                        "all_gather",
                                                        "refuse_collective",
                                                        "ring_all_reduce",
                                                        "recursive_doubling_all_reduce",
                                                        "direct_all_reduce",
                                                        "direct_reduce_scatter",
                                                        "direct_all_gather"};

namespace collective_kind {
inline constexpr TraceKind kPush{18},  // a chunk is written to the ranks that reduce or gather it; token: its number
    kChunkWait{19},                    // for a chunk of `peer`
    kPull{20},                         // a chunk of another rank's share is copied into out
    kCallWait{21},                     // for `peer` to make this call
    kDisagreement{22};                 // only in reports: `peer` makes a different call
}
inline constexpr SliceName kCollectiveKinds[] = {
    {"push"}, {"chunk_wait", "chunk"}, {"pull"}, {"call_wait", "call"}, {"disagreement", "same call"}};

inline constexpr Vocabulary kCollectiveVocabulary{.client = "Collectives",
                                                  .memory_advice = "pass a smaller max_nbytes or symmetric_nbytes",
                                                  .first_operation = collective_op::kOneShot,
                                                  .operations = kCollectiveOperations,
                                                  .first_kind = collective_kind::kPush,
                                                  .kinds = kCollectiveKinds};
static_assert(kCollectiveVocabulary.operation_named("refuse_collective") == collective_op::kRefuse);
static_assert(kCollectiveVocabulary.operation_named("direct_all_gather") == collective_op::kDirectAllGather);

}  // namespace moe_a2a
