// Every tile of an expert is visited exactly once, for any number of tiles.
#include "moe/experts/tile_order.h"

#include <gtest/gtest.h>

#include <set>
#include <utility>
#include <vector>

namespace moe_a2a {
namespace {

using Places = std::set<std::pair<int, int>>;

class TileOrder : public testing::TestWithParam<std::pair<int, int>> {
 protected:
  int row_tiles() const { return GetParam().first; }
  int column_tiles() const { return GetParam().second; }
  // False for a tile that has been seen before or does not belong to this expert.
  bool add(const ExpertTile& tile) {
    return tile.row_tile >= 0 && tile.row_tile < row_tiles() && tile.column_tile >= 0 &&
           tile.column_tile < column_tiles() && places_.insert({tile.row_tile, tile.column_tile}).second;
  }
  Places places_;
};

TEST_P(TileOrder, SinglesCoverAll) {
  const int num_units = SingleTiles::num_units(row_tiles(), column_tiles());
  for (int unit = 0; unit < num_units; ++unit) {
    ASSERT_TRUE(add(SingleTiles::tile(unit, row_tiles(), column_tiles(), 0))) << "unit " << unit;
  }
  EXPECT_EQ(places_.size(), static_cast<size_t>(row_tiles()) * column_tiles());
}

// One block of one unit may be idle if both numbers are odd.
TEST_P(TileOrder, PairsCoverAll) {
  const int num_units = PairedTiles::num_units(row_tiles(), column_tiles());
  int num_idle = 0;
  for (int unit = 0; unit < num_units; ++unit) {
    const ExpertTile first = PairedTiles::tile(unit, row_tiles(), column_tiles(), 0);
    const ExpertTile second = PairedTiles::tile(unit, row_tiles(), column_tiles(), 1);
    ASSERT_EQ(first.shares_columns, second.shares_columns);
    ASSERT_EQ(first.shares_columns, first.column_tile == second.column_tile) << "unit " << unit;
    ASSERT_EQ(first.shares_columns, first.row_tile != second.row_tile) << "unit " << unit;
    ASSERT_TRUE(add(first)) << "unit " << unit;
    if (second.column_tile == column_tiles()) {
      ++num_idle;
    } else {
      ASSERT_TRUE(add(second)) << "unit " << unit;
    }
  }
  EXPECT_EQ(places_.size(), static_cast<size_t>(row_tiles()) * column_tiles());
  EXPECT_EQ(num_idle, row_tiles() % 2 * (column_tiles() % 2));
}

// Row tiles change fastest, so a tile of weights stays in the cache until its whole group has used it.
TEST_P(TileOrder, RowTilesChangeFastest) {
  const int num_units = SingleTiles::num_units(row_tiles(), column_tiles());
  for (int unit = 1; unit < num_units; ++unit) {
    const ExpertTile before = SingleTiles::tile(unit - 1, row_tiles(), column_tiles(), 0);
    const ExpertTile tile = SingleTiles::tile(unit, row_tiles(), column_tiles(), 0);
    const bool is_next_row = tile.column_tile == before.column_tile && tile.row_tile == before.row_tile + 1;
    const bool ends_a_group =
        before.row_tile % kRowTilesInGroup == kRowTilesInGroup - 1 || before.row_tile == row_tiles() - 1;
    EXPECT_TRUE(is_next_row || ends_a_group) << "unit " << unit;
  }
}

std::vector<std::pair<int, int>> numbers_of_tiles() {
  std::vector<std::pair<int, int>> all;
  for (int rows : {0, 1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 64}) {
    for (int columns : {1, 2, 3, 7, 8, 16, 28}) all.emplace_back(rows, columns);
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Numbers, TileOrder, testing::ValuesIn(numbers_of_tiles()));

}  // namespace
}  // namespace moe_a2a
