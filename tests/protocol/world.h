// The ranks of one scenario, their memory, and the names of its fields.
#pragma once

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "memory_map.h"
#include "model_rank.h"

namespace moe_a2a {

struct Scenario {
  std::string name;
  Shape shape;
  std::function<Program(ModelRank& rank)> program;    // for each rank
  std::function<Program(ModelRank& rank)> host = {};  // for a thread beside each rank; may be empty
  int num_clock_jumps = 0;
  int schedule_divisor = 1;  // long cases get fewer schedules
};

// For GoogleTest's messages.
inline void PrintTo(const Scenario& scenario, std::ostream* out) { *out << scenario.name; }

class World final : public Stage {
 public:
  explicit World(const Scenario& scenario);

  std::vector<Program> programs() const override;
  void reset() override;
  std::byte* memory() const override { return memory_; }
  size_t nbytes() const override { return nbytes_; }
  Field field_of(const void* address) const override { return map_.field_of(address); }
  bool is_unused_pair(const void* address) const override;
  std::string name_of(const void* address) const override { return map_.name_of(address); }
  int num_clock_jumps() const override { return scenario_.num_clock_jumps; }
  uint64_t clock_offset(int stream) const override { return ModelRank::clock_offset(stream); }

 private:
  size_t offset_of(const void* address) const {
    return static_cast<size_t>(static_cast<const std::byte*>(address) - memory_);
  }
  void name_regions(const ModelRank& rank);
  void mark_fields();
  bool sends_to(int rank, int peer) const;

  Scenario scenario_;
  std::vector<std::max_align_t> storage_;
  std::byte* memory_;
  size_t nbytes_, symmetric_bytes_;
  std::vector<std::unique_ptr<ModelRank>> ranks_;
  MemoryMap map_;
};

}  // namespace moe_a2a
