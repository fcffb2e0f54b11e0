// A multiplying warp of the pipelined GEMM: it multiplies its warp group's part of each tile, stage by stage, stores
// the results and hands the tile over to readers.
#pragma once

#include "moe/experts/few_rows_results.h"
#include "moe/experts/pipelined_results.h"
#include "moe/experts/tile_recorder.h"

#if defined(MOE_A2A_HAS_TILE_PIPELINE)

namespace moe_a2a::inline MOE_A2A_TARGET {

// Of a tile with many rows a warp group takes 64 rows and all columns. Of a float8 tile with few rows it takes all rows
// and 64 columns of each half, so that a thread has fewer sums to scale (docs/experts.md).
template <class T, bool kGated, bool kSends, class Tiles>
class MultiplyingWarp {
 public:
  using Memory = PipelineMemory;
  static constexpr bool kIsFloat8 = std::is_same_v<T, Float8>;
  static constexpr int kLeastRows = 16;  // that are multiplied

  // warp: among those that multiply.
  MOE_A2A_DEVICE MultiplyingWarp(const GroupedGemmArgs& args, const Memory& memory, int warp, int block, int num_steps)
      : args_(args),
        memory_(memory),
        warp_(warp),
        group_(warp / 4),
        block_(block),
        num_steps_(num_steps),
        recorder_(args.trace, warp),
        units_(memory),
        tiles_(args, Warp{}) {}

  // How many rows of a tile with `num_rows` are multiplied.
  MOE_A2A_DEVICE static int padded_rows(int num_rows) {
    if (kIsFloat8 && num_rows <= Memory::kFewRows) return num_rows <= kLeastRows ? kLeastRows : Memory::kFewRows;
    return div_up(num_rows, Matrix::kRows) * Matrix::kRows;
  }

  MOE_A2A_DEVICE void run() {
    next_tile();
    while (is_tile_) {
      if (!kIsFloat8 || tiles_.num_positions > Memory::kFewRows) {
        if (tiles_.num_positions > group_ * Matrix::kRows) {
          multiply_many_rows();
        } else {
          pass_tile();
        }
      } else if (tiles_.num_positions > kLeastRows) {
        multiply_few_rows<Memory::kFewRows>();
      } else {
        multiply_few_rows<kLeastRows>();
      }
    }
    recorder_.close(args_.trace);
  }

 private:
  using Matrix = WarpGroupMatrix<T>;

  MOE_A2A_DEVICE void next_tile() { is_tile_ = tiles_.seek(units_.next(Warp{}), block_); }

  MOE_A2A_DEVICE void multiply_many_rows() {
    const int first_row = warp_ * Memory::kWarpRows;
    const ResultPlace place = place_of(first_row, 0);
    Matrix matrix;
    if constexpr (kIsFloat8) {
      add_scaled_products(first_row, matrix);
    } else {
      const int last = start_products(matrix);
      next_tile();  // overlaps the last product
      matrix.template wait<0>();
      release(last);
    }
    PipelinedResults<T, kGated>::store(args_, matrix, place);
    hand_over(place);
    if constexpr (kIsFloat8) next_tile();
  }

  template <int kRows>
  MOE_A2A_DEVICE void multiply_few_rows() {
    if constexpr (kIsFloat8) {
      using Results = FewRowsResults<kGated, kRows>;
      const ResultPlace place = place_of(0, warp_ * Results::kColumns);
      typename Results::Matrix matrix;
      add_scaled_products(matrix);
      Results::store(args_, memory_, matrix, place);
      hand_over(place);
      next_tile();
    }
  }

  // This warp group has no rows of the tile.
  MOE_A2A_DEVICE void pass_tile() {
    for (int step = 0; step < num_steps_; ++step, ring_.advance()) {
      barrier_wait(memory_.full(ring_.stage), ring_.parity);
      release(ring_.stage);
    }
    hand_over();
    next_tile();
  }

  MOE_A2A_DEVICE ResultPlace place_of(int first_row, int first_column) const {
    constexpr int kColumns = PipelinedResults<T, kGated>::kOutColumns;
    return {.memory = memory_.results(warp_),
            .expert = tiles_.expert,
            .first_position = tiles_.first_position + first_row,
            .num_rows = tiles_.num_positions - first_row,
            .first_column = tiles_.column_tile * kColumns + first_column};
  }

  MOE_A2A_DEVICE void release(int stage) const {
    if (Warp{}.rank() < PairedTiles::kBlocks) barrier_arrive_at(memory_.empty(stage), Warp{}.rank());
  }

  MOE_A2A_DEVICE void hand_over(const ResultPlace& place) {
    recorder_.tile(args_, place);
    hand_over();
  }
  // Tells the warp that publishes tiles that this one has stored its part, or has none.
  MOE_A2A_DEVICE void hand_over() {
    if constexpr (kSends) {
      barrier_wait(memory_.published(turn_.place()), turn_.parity() ^ 1);
      warp_sync();
      if (Warp{}.rank() == 0) barrier_arrive(memory_.stored(turn_.place()));
      ++turn_.number;
    }
  }

  MOE_A2A_DEVICE uint32_t rows_of_group(int stage) const {
    return memory_.rows(stage) + group_ * Matrix::kRows * Memory::kRowBytes;
  }

  // Releases all stages but the last, which it returns.
  MOE_A2A_DEVICE int start_products(Matrix& matrix) {
    int previous = -1;
    MOE_A2A_ROLLED
    for (int step = 0; step < num_steps_; ++step, ring_.advance()) {
      barrier_wait(memory_.full(ring_.stage), ring_.parity);
      matrix.start(rows_of_group(ring_.stage), memory_.columns(ring_.stage), step == 0);
      matrix.template wait<1>();
      if (previous >= 0) release(previous);
      previous = ring_.stage;
    }
    return previous;
  }

  // Float8: products of half a tile's columns, one scale deep, are scaled and added to the sums. There are registers
  // for one such product only: while a warp group scales, the products of the other one run.
  MOE_A2A_DEVICE void add_scaled_products(int first_row, Matrix& matrix) {
    const int row = first_row + Warp{}.rank() / 4;
    matrix.clear();
    for (int step = 0; step < num_steps_; ++step, ring_.advance()) {
      const int stage = ring_.stage;
      barrier_wait(memory_.full(stage), ring_.parity);
      matrix.start(rows_of_group(stage), memory_.columns(stage));
      const FloatPair of_columns = load_pair(memory_.column_scales(stage));  // while the first product runs
      const float upper = load_float(memory_.row_scales(stage) + row * 4);
      const float lower = load_float(memory_.row_scales(stage) + (row + 8) * 4);
      matrix.wait();
      matrix.add(0, upper * of_columns.first, lower * of_columns.first);
      matrix.start(rows_of_group(stage), memory_.columns(stage) + Memory::kHalfBytes);
      matrix.wait();
      release(stage);
      matrix.add(1, upper * of_columns.second, lower * of_columns.second);
    }
  }

  template <int kRows>
  MOE_A2A_DEVICE void add_scaled_products(FewRowsMatrix<kRows, Memory::kHalfBytes>& matrix) {
    matrix.clear();
    FewRowsMatrix<kRows, Memory::kHalfBytes> product;
    for (int step = 0; step < num_steps_; ++step, ring_.advance()) {
      const int stage = ring_.stage;
      barrier_wait(memory_.full(stage), ring_.parity);
      product.start(memory_.rows(stage), memory_.columns(stage) + group_ * Memory::kHalfBytes / 2);
      const FloatPair of_columns = load_pair(memory_.column_scales(stage));
      FloatPair of_rows[kRows / 8];
      MOE_A2A_UNROLL
      for (int j = 0; j < kRows / 8; ++j) of_rows[j] = load_pair(memory_.row_scales(stage) + product.row(j) * 4);
      product.wait();
      release(stage);
      matrix.add(product, of_rows, of_columns);
    }
  }

  const GroupedGemmArgs& args_;
  Memory memory_;
  int warp_, group_, block_, num_steps_;
  StageRing ring_;
  Turn turn_;  // to hand over a tile
  TileRecorder recorder_;
  UnitReader<kSends> units_;
  Tiles tiles_;
  bool is_tile_ = false;
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET

#endif
