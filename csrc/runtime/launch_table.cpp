#include "runtime/launch_table.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace moe_a2a {

LaunchTable::LaunchTable(std::vector<LaunchStep> steps) : steps_(std::move(steps)) {
  int before = 0;
  for (const LaunchStep& step : steps_) {
    if (step.max_tokens <= before || step.dispatch_blocks < 1 || step.combine_blocks < 1) {
      throw std::invalid_argument("launch table: the step (" + std::to_string(step.max_tokens) + ", " +
                                  std::to_string(step.dispatch_blocks) + ", " + std::to_string(step.combine_blocks) +
                                  ") follows max_tokens=" + std::to_string(before) +
                                  "; pass (max_tokens, dispatch_blocks, combine_blocks), all positive, max_tokens "
                                  "ascending");
    }
    before = step.max_tokens;
  }
}

LaunchStep LaunchTable::step(int num_tokens) const {
  if (steps_.empty()) return {};
  const auto found =
      std::find_if(steps_.begin(), steps_.end(), [&](const LaunchStep& step) { return num_tokens <= step.max_tokens; });
  return found != steps_.end() ? *found : steps_.back();
}

}  // namespace moe_a2a
