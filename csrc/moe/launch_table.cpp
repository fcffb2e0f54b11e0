#include "moe/launch_table.h"

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
  for (const LaunchStep& step : steps_) {
    if (num_tokens <= step.max_tokens) return step;
  }
  return steps_.empty() ? LaunchStep{} : steps_.back();
}

int resident_blocks(int wanted, int max_blocks) { return std::max(1, std::min(wanted, max_blocks)); }

// Receivers write the lists, for which a dozen blocks suffice, and poll signals. (H200, 24 blocks, 4096 tokens: 388 us
// with 3 receivers, 184 with 6.)
int dispatch_senders(int num_blocks) {
  const int receivers = std::max(num_blocks / 8, std::min(num_blocks / 4, 12));
  return num_blocks - std::max(1, receivers);
}

// Receivers add up one row per rank. Senders read several times as many, or, if presummed, send finished sums, all but
// their own. (2 H200, 4096 tokens, presummed: an SM sends 35 KB/us and adds up 43. 24 blocks: 189 us with 10 senders,
// 196 with 9 or 11, 218 with 8. 132 blocks: 187 us with 33 or 48 senders, 192 with 66.)
int combine_senders(int num_blocks, bool presummed, int num_ranks) {
  if (!presummed) return num_blocks - std::max(1, num_blocks / 3);
  const int sent = 5 * (num_ranks - 1), added = 4 * num_ranks;
  const int by_work = (num_blocks * sent + sent + added - 1) / (sent + added), enough = std::max(num_blocks / 3, 10);
  return std::clamp(std::min(by_work, enough), 1, num_blocks - 1);
}

// Receivers decode one sum per rank, which takes half as long again as encoding one; presummed, a rank's own is not
// encoded. (132 blocks, 4096 tokens, q8 and q4. 4 H100: 419 and 419 us with 46 senders, 410 and 376 with 55, 448 and
// 400 with 66. 2 H200, a dispatch and a presummed combine: 347 and 345 us with 33, 352 and 340 with 44, 374 and 361
// with 52.)
int coded_combine_senders(int num_blocks, bool presummed, int num_ranks) {
  const int sent = 2 * (presummed ? num_ranks - 1 : num_ranks), added = 3 * num_ranks;
  return std::max(1, num_blocks * sent / (sent + added));
}

// One H200, 132 blocks: with 0 to 12 that only send, the times of an expert layer were within 1 %; with 20, up to 4 %
// longer. Eight of them could send everything while the product runs, if its rows were complete earlier.
int product_senders(int num_blocks) { return std::max(1, num_blocks / 16); }

}  // namespace moe_a2a
