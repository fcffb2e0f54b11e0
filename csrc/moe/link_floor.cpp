// The bare push of rows, for benchmarks: see moe/link_floor.h.
#include "moe/link_floor.h"

#include "moe/expert_parallel.h"

namespace moe_a2a {

void ExpertParallel::push_rows(const Rows& x, int num_rows, int64_t row_bytes, const Push* pushes, PushBy by,
                               const LaunchPlace& place) {
  const CallGate::Turn turn = gate_.enter();
  require_open();
  const int buffer = buffers_.first_free();
  if (buffer < 0) throw std::runtime_error("push_rows: every buffer is open; combine() or release() one first");
  launch(PushRowsArgs{.context = context_,
                      .buffer = buffer,
                      .num_rows = num_rows,
                      .x = x,
                      .row_bytes = row_bytes,
                      .pushes = pushes,
                      .by = by},
         blocks(place, 0), place.stream);
}

}  // namespace moe_a2a
