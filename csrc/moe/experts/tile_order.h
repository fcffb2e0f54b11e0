// The order in which the tiles of one expert's product are computed. Pure arithmetic.
//
// Tiles computed at about the same time share rows and weights in the last-level cache: each group of kRowTilesInGroup
// row tiles takes all columns before the next group begins, and row tiles change fastest, so a tile of weights is read
// from memory once per group.
#pragma once

#include "arch/attributes.h"

namespace moe_a2a {

struct ExpertTile {
  int row_tile, column_tile;
  bool shares_columns;  // both blocks of the unit have the same column tile
};

inline constexpr int kRowTilesInGroup = 16;

MOE_A2A_HOST_DEVICE constexpr int div_up(int a, int b) { return (a + b - 1) / b; }

// ---- a unit of work is one tile

struct SingleTiles {
  static constexpr int kBlocks = 1;  // per unit

  MOE_A2A_HOST_DEVICE static constexpr int num_units(int row_tiles, int column_tiles) {
    return row_tiles * column_tiles;
  }
  MOE_A2A_HOST_DEVICE static constexpr ExpertTile tile(int unit, int row_tiles, int column_tiles, int /*block*/) {
    const int first = unit / (kRowTilesInGroup * column_tiles) * kRowTilesInGroup;
    const int in_group = unit - first * column_tiles;
    const int rows = row_tiles - first < kRowTilesInGroup ? row_tiles - first : kRowTilesInGroup;
    return {first + in_group % rows, in_group / rows, false};
  }
};

// ---- a unit of work is a pair of tiles for a cluster of two blocks: two row tiles of one column tile, whose weights
// are read once for both. If the number of row tiles is odd, the last is paired with itself over two column tiles, the
// second of which may lie past the last column.

struct PairedTiles {
  static constexpr int kBlocks = 2;

  MOE_A2A_HOST_DEVICE static constexpr int units_of_group(int row_tiles, int column_tiles) {
    return column_tiles / 2 * row_tiles + column_tiles % 2 * ((row_tiles + 1) / 2);
  }
  MOE_A2A_HOST_DEVICE static constexpr int num_units(int row_tiles, int column_tiles) {
    return row_tiles / kRowTilesInGroup * units_of_group(kRowTilesInGroup, column_tiles) +
           units_of_group(row_tiles % kRowTilesInGroup, column_tiles);
  }
  MOE_A2A_HOST_DEVICE static constexpr ExpertTile tile(int unit, int row_tiles, int column_tiles, int block) {
    const int full = units_of_group(kRowTilesInGroup, column_tiles);
    const int first = unit / full * kRowTilesInGroup;
    unit %= full;
    const int rows = row_tiles - first < kRowTilesInGroup ? row_tiles - first : kRowTilesInGroup;
    const int pairs = rows / 2;
    const int two_columns = unit / rows, i = unit % rows;  // `rows` units for every two column tiles
    const bool is_last_alone = 2 * two_columns + 1 >= column_tiles;
    if (i < (is_last_alone ? pairs : 2 * pairs)) {
      return {first + i % pairs * 2 + block, 2 * two_columns + i / pairs, true};
    }
    return {first + rows - 1, 2 * two_columns + block, false};
  }
};

}  // namespace moe_a2a
