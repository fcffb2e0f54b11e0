// The ranks of one case of collectives, their memory, and its names.
#pragma once

#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "collective_rank.h"
#include "memory_map.h"

namespace moe_a2a {

// For the test framework's messages.
inline void PrintTo(const CollectiveCase& shape, std::ostream* out) { *out << shape.name; }

class CollectiveWorld final : public Stage {
 public:
  explicit CollectiveWorld(const CollectiveCase& shape);

  std::vector<Program> programs() const override;
  void reset() override;
  std::byte* memory() const override { return memory_; }
  size_t nbytes() const override { return nbytes_; }
  Field field_of(const void* address) const override { return map_.field_of(address); }
  bool is_unused_pair(const void*) const override { return false; }
  std::string name_of(const void* address) const override { return map_.name_of(address); }
  int num_clock_jumps() const override { return num_clock_jumps_; }

 private:
  void name_regions(const CollectiveRank& rank);

  std::vector<std::max_align_t> storage_;
  std::byte* memory_;
  size_t nbytes_;
  std::vector<std::unique_ptr<CollectiveRank>> ranks_;
  MemoryMap map_;
  int num_clock_jumps_ = 0;
};

}  // namespace moe_a2a
