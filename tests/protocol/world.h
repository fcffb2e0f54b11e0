// The ranks of one scenario, their memory, and the names of its fields.
#pragma once

#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "model_rank.h"
#include "model_stage.h"

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

class World final : public ModelStage<ModelRank> {
 public:
  explicit World(const Scenario& scenario);

  std::vector<Program> programs() const override;
  bool is_unused_pair(const void* address) const override;
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
  size_t symmetric_bytes_;
};

}  // namespace moe_a2a
