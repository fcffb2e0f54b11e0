// What the collectives are called in reports and traces.
#pragma once

#include "comm/vocabulary.h"

namespace moe_a2a {

namespace collective_op {
inline constexpr Operation kOneShot{48};
}
inline constexpr const char* kCollectiveOperations[] = {"one_shot_all_reduce"};

namespace collective_kind {
inline constexpr TraceKind kPush{16},  // a chunk is written to every rank and signalled; token: its number
    kChunkWait{17};                    // for a chunk of `peer`
}
inline constexpr SliceName kCollectiveKinds[] = {{"push"}, {"chunk_wait", "chunk"}};

inline constexpr Vocabulary kCollectiveVocabulary{.client = "Collectives",
                                                  .first_operation = collective_op::kOneShot,
                                                  .operations = kCollectiveOperations,
                                                  .first_kind = collective_kind::kPush,
                                                  .kinds = kCollectiveKinds};

}  // namespace moe_a2a
