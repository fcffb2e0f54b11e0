// The second product of an expert layer and the combine_send of its rows in one launch: a few blocks send each landed
// row as soon as its terms are stored; the others multiply, then join them. The sums leave as whole rows, so this is
// not for batches whose sums may return as LL words.
#pragma once

#include <algorithm>

#include "moe/combine/combine_send_stored.h"
#include "moe/experts/grouped_gemm.h"
#include "moe/experts/product_combine_args.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

template <class T>
struct ProductCombineSend {
  using Args = ProductCombineSendArgs;
  using Product = GroupedGemmOf<T, false>;
  static constexpr const char* kName = "product_combine_send";

  static size_t shared_bytes(const Args& args) {
    return std::max<size_t>(BlockTile<T>::kSharedBytes, static_cast<size_t>(CombineSendStored::plan(args.send).bytes));
  }

  // The first blocks multiply: they start first, and wait for no other block until they have multiplied.
  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte* shared) {
    const int num_multipliers = grid.size() - args.num_send_blocks;
    if (grid.rank() < num_multipliers) {
      const uint64_t start = trace_now();
      Product::run(args.product, Grid{grid.rank(), num_multipliers}, block, shared);
      record_role(args.send.context, block, moe_op::kGroupedGemm, start);
      block.sync();
    }
    const uint64_t start = trace_now();
    const StoredTiles stored = {args.product.stored_tiles, Product::tiles_of_a_row(args.product)};
    CombineSendStored::send(args.send, stored, grid, block, shared);
    record_role(args.send.context, block.warp(), moe_op::kCombineSend, start);
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
