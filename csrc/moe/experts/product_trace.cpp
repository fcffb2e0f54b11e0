#include "moe/experts/product_trace.h"

namespace moe_a2a {

void ProductTrace::run(const GroupedGemmPlace& place, GroupedGemmArgs args) {
  if (shown_.is_on()) {
    order_.next(device_, place.stream);
    args.trace = shown_;
    args.follows_product = false;  // each continues the segments of the one before
  }
  run_grouped_gemm(place, args);
}

}  // namespace moe_a2a
