// What a rank tells the others before anything is mapped: where its region is, and the values that all must agree on.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "arch/memory_handle.h"

namespace moe_a2a {

// A value that must be equal on every rank, as text, so that it can be compared and shown without knowing the client.
struct AgreedField {
  char name[32] = {};
  char value[32] = {};
};
AgreedField agreed(const char* name, const std::string& value);
inline AgreedField agreed(const char* name, int64_t value) { return agreed(name, std::to_string(value)); }

// Plain bytes without padding: any channel can carry them.
struct RegionHandle {
  static constexpr uint64_t kMagic = 0x6132615f656f6dull;  // "moe_a2a"
  static constexpr int32_t kVersion = 3;
  static constexpr int kMaxFields = 12;

  uint64_t magic = kMagic;
  uint64_t checksum = 0;  // over all other bytes; see seal()
  MemoryHandle memory;
  uint64_t layout_digest = 0;  // of the sequence of fields in the region
  int32_t version = kVersion;
  int32_t rank = 0;
  int32_t num_ranks = 0;
  int32_t num_fields = 0;
  char client[24] = {};  // whose region it is: "ExpertParallel"
  char target[8] = {};
  AgreedField field[kMaxFields];

  void seal() { checksum = sum(); }
  uint64_t sum() const;
};
static_assert(std::has_unique_object_representations_v<RegionHandle>);

// The first disagreement among `handles` (one per rank, in rank order), naming both ranks, the argument and the values;
// empty when they agree. Every rank sees the same handles, so either all throw or none.
std::string disagreement(const std::vector<RegionHandle>& handles);

// Distinguishes the handles of one set of objects from those of any other; never 0.
uint64_t digest_of(const std::vector<RegionHandle>& handles);

// How the handle at this rank's place differs from this rank's own; empty if it does not.
std::string not_own(const std::vector<RegionHandle>& handles, const RegionHandle& own);

}  // namespace moe_a2a
