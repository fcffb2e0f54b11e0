// The bare push of rows, for benchmarks: see moe/link_floor.h.
#include "moe/link_floor.h"

#include <algorithm>

#include "moe/expert_parallel.h"

namespace moe_a2a {

void ExpertParallel::push_rows(const Rows& x, int num_rows, int64_t row_bytes, const Push* pushes, PushBy by,
                               const LaunchPlace& place) {
  const CallGate::Turn turn = gate_.enter();
  require_open();
  const auto free = std::find_if(buffers_.begin(), buffers_.end(), [](const Buffer& buffer) { return !buffer.open; });
  if (free == buffers_.end())
    throw std::runtime_error("push_rows: every buffer is open; combine() or release() one first");
  launch(PushRowsArgs{.context = context_,
                      .buffer = static_cast<int>(free - buffers_.begin()),
                      .num_rows = num_rows,
                      .x = x,
                      .row_bytes = row_bytes,
                      .pushes = pushes,
                      .by = by},
         blocks(place, 0), place.stream);
}

}  // namespace moe_a2a
