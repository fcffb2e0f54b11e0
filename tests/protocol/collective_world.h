// The ranks of one case of collectives, their memory, and its names.
#pragma once

#include <ostream>
#include <vector>

#include "collective_rank.h"
#include "model_stage.h"

namespace moe_a2a {

// For the test framework's messages.
inline void PrintTo(const CollectiveCase& shape, std::ostream* out) { *out << shape.name; }

class CollectiveWorld final : public ModelStage<CollectiveRank> {
 public:
  explicit CollectiveWorld(const CollectiveCase& shape);

  std::vector<Program> programs() const override;
  bool is_unused_pair(const void*) const override { return false; }
  int num_clock_jumps() const override { return num_clock_jumps_; }

 private:
  void name_regions(const CollectiveRank& rank);

  int num_clock_jumps_ = 0;
};

}  // namespace moe_a2a
