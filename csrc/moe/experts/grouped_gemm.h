// The grouped GEMM for every target: blocks take tiles in turn; a tile is computed by the target's BlockTile.
#pragma once

#include "arch/arch.h"
#include "moe/experts/activation.h"
#include "moe/experts/expert_tiles.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// The row of x at a position; -1: zeros, also for list entries that no dispatch has written.
MOE_A2A_DEVICE int row_of_position(const GroupedGemmArgs& args, int position) {
  const int row = args.row_index != nullptr ? args.row_index[position] : position;
  return row < args.num_x_rows ? row : -1;
}

template <class T, bool kGated>
struct GroupedGemmOf {
  using Tile = BlockTile<T>;
  // A tile multiplies two groups of rows of w: gate and up of the same columns, or neighbouring columns.
  static constexpr int kTileColumns = kGated ? Tile::kColumns : 2 * Tile::kColumns;
  using Tiles = ExpertTiles<SingleTiles, Tile::kRows, kTileColumns>;

  MOE_A2A_DEVICE static void run(const GroupedGemmArgs& args, const Grid& grid, const Block& block, std::byte* shared) {
    Tiles tiles(args, block.warp());
    for (int unit = grid.rank(); tiles.seek(unit); unit += grid.size()) multiply(args, tiles, block, shared);
  }

  MOE_A2A_DEVICE static void multiply(const GroupedGemmArgs& args, const Tiles& tiles, const Block& block,
                                      std::byte* shared) {
    const int first_column = tiles.column_tile * kTileColumns;
    const int64_t first_row_of_w = tiles.expert * args.rows_of_w();
    const T* w = static_cast<const T*>(args.w) + first_row_of_w * args.depth;
    const float* bias = args.bias == nullptr ? nullptr : args.bias + first_row_of_w;
    T* out = static_cast<T*>(args.out) + int64_t{tiles.first_position} * args.num_columns;
    const auto row_of_x = [&](int i) -> const T* {
      const int row = i < tiles.num_positions ? row_of_position(args, tiles.first_position + i) : -1;
      return row < 0 ? nullptr : static_cast<const T*>(args.x) + row * args.x_stride;
    };
    // -1 past the last column.
    const auto row_of_weights = [&](int half, int j) -> int64_t {
      const int column = first_column + j + (kGated ? 0 : half * Tile::kColumns);
      return column < args.num_columns ? args.row_of_w(kGated ? half : 0, column) : -1;
    };
    const auto row_of_w = [&](int half, int j) -> const T* {
      const int64_t row = row_of_weights(half, j);
      return row < 0 ? nullptr : w + row * args.depth;
    };
    const auto with_bias = [&](int half, int j, float sum) {
      const int64_t row = bias == nullptr ? -1 : row_of_weights(half, j);
      return row < 0 ? sum : sum + bias[row];
    };
    const auto store = [&](int i, int j, float first, float second) {
      const int column = first_column + j;
      if (i >= tiles.num_positions || column >= args.num_columns) return;
      T* target = out + int64_t{i} * args.num_columns + column;
      first = with_bias(0, j, first);
      second = with_bias(1, j, second);
      with_function(args.activation, [&](auto f) {
        if constexpr (kGated) {
          *target = from_float<T>(gated(args.activation, f, first, second));
        } else {
          *target = from_float<T>(f(first));
          if (column + Tile::kColumns < args.num_columns) target[Tile::kColumns] = from_float<T>(f(second));
        }
      });
    };
    Tile::multiply(block, shared, tiles.num_positions, args.depth, row_of_x, row_of_w, store);
  }
};

template <class T, bool kGated>
struct GroupedGemm {
  using Args = GroupedGemmArgs;
  static constexpr const char* kName = "grouped_gemm";
  static size_t shared_bytes(const Args&) { return BlockTile<T>::kSharedBytes; }
  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte* shared) {
    GroupedGemmOf<T, kGated>::run(args, grid, block, shared);
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
