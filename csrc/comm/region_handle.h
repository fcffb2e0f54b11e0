// What a rank tells the others before anything is mapped: where its region is, and what it believes all agree on.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "arch/memory_handle.h"

namespace moe_a2a {

// A value that must be the same on every rank, as text: it can be compared and shown without knowing the client.
struct AgreedField {
  char name[32] = {};
  char value[32] = {};
};
AgreedField agreed(const char* name, const std::string& value);
inline AgreedField agreed(const char* name, int64_t value) { return agreed(name, std::to_string(value)); }

// Plain bytes without padding: any channel may carry them.
struct RegionHandle {
  static constexpr uint64_t kMagic = 0x6132615f656f6dull;  // "moe_a2a"
  static constexpr int32_t kVersion = 3;
  static constexpr int kMaxFields = 12;

  uint64_t magic = kMagic;
  uint64_t checksum = 0;  // of all other bytes; see seal()
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

// The first disagreement among `handles` (one per rank, in rank order), in words that name both ranks, the argument and
// the values; empty when they agree. Every rank sees the same handles, so all raise or none.
std::string disagreement(const std::vector<RegionHandle>& handles);

// What tells the handle at this rank's own place from its own; empty when it is its own.
std::string not_own(const std::vector<RegionHandle>& handles, const RegionHandle& own);

}  // namespace moe_a2a
