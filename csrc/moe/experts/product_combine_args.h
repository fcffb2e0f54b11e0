// Arguments of the second product fused with combine_send (product_combine_send.h).
#pragma once

#include "moe/args.h"
#include "moe/experts/grouped_gemm_args.h"

namespace moe_a2a {

struct ProductCombineSendArgs {
  GroupedGemmArgs product;  // with stored_tiles; its result is the y of `send`
  CombineSendArgs send;
  int num_send_blocks = 0;  // that only send: the last ones of the grid
};

}  // namespace moe_a2a
