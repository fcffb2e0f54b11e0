// The grouped GEMM for every target: blocks take tiles round-robin; the target's BlockTile computes a tile.
#pragma once

#include <type_traits>

#include "arch/arch.h"
#include "moe/experts/activation.h"
#include "moe/experts/expert_tiles.h"
#include "moe/experts/stored_tiles.h"
#include "moe/vocabulary.h"
#include "rows/quantize.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// The row of x at a position; -1: zeros, also for list entries that no dispatch has written.
MOE_A2A_DEVICE int row_of_position(const GroupedGemmArgs& args, int position) {
  const int row = args.row_index != nullptr ? args.row_index[position] : position;
  return row < args.num_x_rows ? row : -1;
}

MOE_A2A_HOST_DEVICE TraceEvent tile_event(int expert, int num_rows, uint64_t begin) {
  return {.kind = moe_kind::kTile, .begin = begin, .token = expert, .polls = static_cast<uint32_t>(num_rows)};
}

template <class T, bool kGated>
struct GroupedGemmOf {
  using Tile = BlockTile<T>;
  static constexpr bool kIsFloat8 = std::is_same_v<T, Float8>;
  // A tile multiplies two groups of rows of w: gate and up of the same columns, or neighbouring columns.
  static constexpr int kTileColumns = kGated ? Tile::kColumns : 2 * Tile::kColumns;
  using Tiles = ExpertTiles<SingleTiles, Tile::kRows, kTileColumns>;

  const GroupedGemmArgs& args;
  const Tiles& tile;
  std::byte* shared;

  MOE_A2A_DEVICE static void run(const GroupedGemmArgs& args, const Grid& grid, const Block& block, std::byte* shared) {
    Tiles tiles(args, block.warp());
    for (int unit = grid.rank(); tiles.seek(unit); unit += grid.size()) {
      const uint64_t start = trace_now();
      GroupedGemmOf{args, tiles, shared}.multiply(block);
      if (args.stored_tiles != nullptr) {
        block.release_sync();
        StoredTiles::add(args.stored_tiles, block, tiles.first_position, tiles.num_positions);
      }
      record(args.trace, block, tile_event(tiles.expert, tiles.num_positions, start));
    }
  }
  MOE_A2A_DEVICE static uint32_t tiles_of_a_row(const GroupedGemmArgs& args) {
    return static_cast<uint32_t>(div_up(args.num_columns, kTileColumns));
  }

  MOE_A2A_DEVICE void multiply(const Block& block) const {
    const auto row_of_x = [&](int i) -> const T* {
      const int row = row_at(i);
      return row < 0 ? nullptr : static_cast<const T*>(args.x) + row * args.x_stride;
    };
    const auto row_of_w = [&](int half, int j) -> const T* {
      const int64_t row = row_of_weights(half, j);
      return row < 0 ? nullptr : static_cast<const T*>(args.w) + row * args.depth;
    };
    const auto store = [&](int i, int j, float first, float second) { finish(i, j, first, second); };
    if constexpr (kIsFloat8) {
      Tile::multiply(block, shared, tile.num_positions, args.depth, row_of_x, row_of_w, store, Scales{*this});
      if (args.out_dtype == DType::kFloat8) quantize(block);
    } else {
      Tile::multiply(block, shared, tile.num_positions, args.depth, row_of_x, row_of_w, store);
    }
  }

  // ---- operands

  MOE_A2A_DEVICE int row_at(int i) const {
    return i < tile.num_positions ? row_of_position(args, tile.first_position + i) : -1;
  }
  MOE_A2A_DEVICE int column_at(int half, int j) const {
    return tile.column_tile * kTileColumns + j + (kGated ? 0 : half * Tile::kColumns);
  }
  // Index of a row of w, over all experts; -1 past the last column.
  MOE_A2A_DEVICE int64_t row_of_weights(int half, int j) const {
    const int column = column_at(half, j);
    if (column >= args.num_columns) return -1;
    return tile.expert * args.rows_of_w() + args.row_of_w(kGated ? half : 0, column);
  }
  struct Scales {
    const GroupedGemmOf& gemm;

    MOE_A2A_DEVICE const float* of_row(int i) const {
      const int row = gemm.row_at(i);
      return row < 0 ? nullptr : gemm.args.x_scales + row * gemm.args.x_scales_stride;
    }
    MOE_A2A_DEVICE const float* of_columns(int half) const {
      return gemm.args.scales_of_w(gemm.tile.expert, kGated ? half : 0, gemm.column_at(half, 0));
    }
  };

  // ---- results

  MOE_A2A_DEVICE void finish(int i, int j, float first, float second) const {
    if (i >= tile.num_positions || column_at(0, j) >= args.num_columns) return;
    first = with_bias(0, j, first);
    second = with_bias(1, j, second);
    with_function(args.activation, [&](auto f) {
      if constexpr (kGated) {
        put(i, 0, j, gated(args.activation, f, first, second));
      } else {
        put(i, 0, j, f(first));
        if (column_at(1, j) < args.num_columns) put(i, 1, j, f(second));
      }
    });
  }
  MOE_A2A_DEVICE float with_bias(int half, int j, float sum) const {
    const int64_t row = args.bias == nullptr ? -1 : row_of_weights(half, j);
    return row < 0 ? sum : sum + args.bias[row];
  }
  MOE_A2A_DEVICE void put(int i, int half, int j, float value) const {
    const int64_t at = int64_t{tile.first_position + i} * args.num_columns + column_at(half, j);
    if constexpr (!kIsFloat8) {
      static_cast<T*>(args.out)[at] = from_float<T>(value);
    } else if (args.out_dtype == DType::kFloat8) {
      unquantized()[i * Tile::kColumns + j] = value;
    } else if (args.out_dtype == DType::kFloat16) {
      static_cast<Half*>(args.out)[at] = from_float<Half>(value);
    } else {
      static_cast<Bfloat16*>(args.out)[at] = from_float<Bfloat16>(value);
    }
  }
  MOE_A2A_DEVICE float* unquantized() const { return reinterpret_cast<float*>(shared); }

  // The tile's results, [num_positions, kColumns] in shared memory, as float8 with one scale per row. Gated only.
  MOE_A2A_DEVICE void quantize(const Block& block) const {
    static_assert(!kIsFloat8 || Tile::kColumns == kScaleBlock);
    const int first_column = column_at(0, 0), rest = args.num_columns - first_column;
    block.sync();
    for (int i = block.warp_rank(); i < tile.num_positions; i += block.num_warps()) {
      const int64_t position = tile.first_position + i;
      quantize_piece(block.warp(), Piece{0, rest < kScaleBlock ? rest : kScaleBlock}, false,
                     unquantized() + i * Tile::kColumns,
                     static_cast<Float8*>(args.out) + position * args.num_columns + first_column,
                     args.out_scales + position * args.column_blocks() + tile.column_tile);
    }
    block.sync();  // before the next tile's operands
  }
};

template <class T, bool kGated>
struct GroupedGemm {
  using Args = GroupedGemmArgs;
  static constexpr const char* kName = "grouped_gemm";
  static size_t shared_bytes(const Args&) { return BlockTile<T>::kSharedBytes; }
  // The warps of a block work on a tile together.
  MOE_A2A_DEVICE static bool warp_keeps_record(const Args&, const Grid&, const Block& block) {
    return block.warp_rank() == 0;
  }
  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte* shared) {
    GroupedGemmOf<T, kGated>::run(args, grid, block, shared);
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
