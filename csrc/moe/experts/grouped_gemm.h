// The grouped GEMM for every target: blocks take tiles in turn; a tile is computed by the target's BlockTile.
#pragma once

#include "arch/arch.h"
#include "moe/experts/expert_tiles.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// The row of x at a position; -1: zeros, also for list entries that no dispatch has written.
MOE_A2A_DEVICE int row_of_position(const GroupedGemmArgs& args, int position) {
  const int row = args.row_index != nullptr ? args.row_index[position] : position;
  return row < args.num_x_rows ? row : -1;
}

MOE_A2A_DEVICE float swiglu(float gate, float up) { return gate * sigmoid(gate) * up; }

template <class T, Activation kActivation>
struct GroupedGemmOf {
  using Tile = BlockTile<T>;
  static constexpr bool kIsSwiglu = kActivation == Activation::kSwiglu;
  // A tile multiplies two groups of rows of w: gate and up of the same columns, or neighbouring columns.
  static constexpr int kTileColumns = kIsSwiglu ? Tile::kColumns : 2 * Tile::kColumns;
  using Tiles = ExpertTiles<SingleTiles, Tile::kRows, kTileColumns>;

  MOE_A2A_DEVICE static void run(const GroupedGemmArgs& args, const Grid& grid, const Block& block, std::byte* shared) {
    Tiles tiles(args, block.warp());
    for (int unit = grid.rank(); tiles.seek(unit); unit += grid.size()) multiply(args, tiles, block, shared);
  }

  MOE_A2A_DEVICE static void multiply(const GroupedGemmArgs& args, const Tiles& tiles, const Block& block,
                                      std::byte* shared) {
    const int first_column = tiles.column_tile * kTileColumns;
    const T* w =
        static_cast<const T*>(args.w) + int64_t{tiles.expert} * args.num_columns * (kIsSwiglu ? 2 : 1) * args.depth;
    T* out = static_cast<T*>(args.out) + int64_t{tiles.first_position} * args.num_columns;
    const auto row_of_x = [&](int i) -> const T* {
      const int row = i < tiles.num_positions ? row_of_position(args, tiles.first_position + i) : -1;
      return row < 0 ? nullptr : static_cast<const T*>(args.x) + row * args.x_stride;
    };
    const auto row_of_w = [&](int half, int j) -> const T* {
      const int column = first_column + j + (kIsSwiglu ? 0 : half * Tile::kColumns);
      if (column >= args.num_columns) return nullptr;
      return w + (int64_t{kIsSwiglu ? half : 0} * args.num_columns + column) * args.depth;
    };
    const auto store = [&](int i, int j, float first, float second) {
      const int column = first_column + j;
      if (i >= tiles.num_positions || column >= args.num_columns) return;
      T* target = out + int64_t{i} * args.num_columns + column;
      if constexpr (kIsSwiglu) {
        *target = from_float<T>(swiglu(first, second));
      } else {
        *target = from_float<T>(first);
        if (column + Tile::kColumns < args.num_columns) target[Tile::kColumns] = from_float<T>(second);
      }
    };
    Tile::multiply(block, shared, tiles.num_positions, args.depth, row_of_x, row_of_w, store);
  }
};

template <class T, Activation kActivation>
struct GroupedGemm {
  using Args = GroupedGemmArgs;
  static constexpr const char* kName = "grouped_gemm";
  static size_t shared_bytes(const Args&) { return BlockTile<T>::kSharedBytes; }
  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte* shared) {
    GroupedGemmOf<T, kActivation>::run(args, grid, block, shared);
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
