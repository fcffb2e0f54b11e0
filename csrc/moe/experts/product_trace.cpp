#include "moe/experts/product_trace.h"

namespace moe_a2a {

void ProductTrace::run(const GroupedGemmPlace& place, GroupedGemmArgs args) {
  if (shown_.is_on()) {
    if (has_run_ && place.stream != last_stream_) device_.order_streams(last_stream_, place.stream);
    has_run_ = true;
    last_stream_ = place.stream;
    args.trace = shown_;
  }
  run_grouped_gemm(place, args);
}

}  // namespace moe_a2a
