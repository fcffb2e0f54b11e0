// The BlockTile of the GPU targets, built on the target's WarpMatrix: both operands go through shared memory, while the
// pieces of the next step are loaded into registers. See block_tile.h.
#pragma once

#include <bit>
#include <type_traits>

#include "arch/block_tile.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

template <class T>
struct BlockTile {
 private:
  static constexpr bool kIsScaled = std::is_same_v<T, Float8>;
  // Float8 is staged as bfloat16, which holds it exactly: sm_80 and gfx90a have no float8 products. gfx942 and gfx950
  // do; whether this kernel would gain from them has not been measured.
  using Staged = std::conditional_t<kIsScaled, Bfloat16, T>;
  using Matrix = WarpMatrix<Staged>;
  static constexpr int kWarps = kBlockThreads / kWarpSize;
  static constexpr int kColumnWarps = kIsScaled     ? kScaleDepth / Matrix::kColumns
                                      : kWarps >= 8 ? kWarps / 4
                                                    : kWarps / 2;
  static constexpr int kRowWarps = kWarps / kColumnWarps;

 public:
  static constexpr int kRows = kRowWarps * Matrix::kRows, kColumns = kColumnWarps * Matrix::kColumns;
  static_assert(!kIsScaled || kColumns == kScaleDepth);

 private:
  static constexpr int kDepth = 32;           // summed per step
  static constexpr int kStride = kDepth + 8;  // of a row in shared memory: spreads rows over the banks
  static constexpr int kStepsOfScale = kScaleDepth / kDepth;
  static constexpr int kPieceElements = 16 / sizeof(T), kPiecesOfRow = kDepth / kPieceElements;
  static constexpr int kAllPieces = (kRows + 2 * kColumns) * kPiecesOfRow;
  static constexpr int kPieces = (kAllPieces + kBlockThreads - 1) / kBlockThreads;  // per thread
  struct Step {
    Staged a[kRows][kStride], b[2 * kColumns][kStride];
  };
  struct Shared {
    Step step[2];
    float scale[2][kIsScaled ? kRows : 1];  // of the rows of A
  };

 public:
  static constexpr int64_t kSharedBytes = sizeof(Shared);
  static_assert(kSharedBytes >= kRows * kColumns * int64_t{sizeof(float)} || !kIsScaled);

  template <class RowOfA, class RowOfB, class Store, class Scales = NoScales>
  MOE_A2A_DEVICE static void multiply(const Block& block, std::byte* memory, int num_rows, int depth, RowOfA row_of_a,
                                      RowOfB row_of_b, Store store, Scales scales = {}) {
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const T* source[kPieces];  // of this thread's pieces in each step
    MOE_A2A_UNROLL
    for (int p = 0; p < kPieces; ++p) {
      const int row = row_of_piece(block, p);
      const T* begin = !is_row(row)  ? nullptr
                       : row < kRows ? row_of_a(row)
                                     : row_of_b((row - kRows) / kColumns, (row - kRows) % kColumns);
      source[p] = begin == nullptr ? nullptr : begin + offset_of_piece(block);
    }
    const int warp_row = block.warp_rank() / kColumnWarps * Matrix::kRows;
    const int warp_column = block.warp_rank() % kColumnWarps * Matrix::kColumns;
    const bool has_rows = warp_row < num_rows;
    Matrix first, second;
    first.clear();
    second.clear();
    ScaledSums<Scales> sums(block, scales);
    const int num_steps = (depth + kDepth - 1) / kDepth;
    Vec16 piece[kPieces];
    load(block, piece, source, 0, depth);
    for (int s = 0; s < num_steps; ++s) {
      Step& step = shared.step[s % 2];  // read two steps ago, before the previous step's barrier
      store_pieces(block, step, piece);
      if constexpr (kIsScaled) {
        if (s % kStepsOfScale == 0) sums.store_scale(shared, block, s / kStepsOfScale, s + kStepsOfScale < num_steps);
      }
      if (s + 1 < num_steps) load(block, piece, source, (s + 1) * kDepth, depth);
      block.sync();
      if (has_rows) {
        first.add_product(block.warp(), step.a[warp_row], step.b[warp_column], kStride, kDepth);
        second.add_product(block.warp(), step.a[warp_row], step.b[kColumns + warp_column], kStride, kDepth);
      }
      if constexpr (kIsScaled) {
        const bool is_last = s + 1 == num_steps || (s + 1) % kStepsOfScale == 0;
        if (is_last && has_rows) sums.add(shared, block, s / kStepsOfScale, warp_row, first, second);
      }
    }
    block.sync();  // the caller, or the next tile, overwrites what the last step reads
    MOE_A2A_UNROLL
    for (int v = 0; v < Matrix::kValues; ++v) {
      const int i = warp_row + Matrix::row_of(block.warp(), v), j = warp_column + Matrix::column_of(block.warp(), v);
      if constexpr (kIsScaled) {
        store(i, j, sums.first[v], sums.second[v]);
      } else {
        store(i, j, first.value[v], second.value[v]);
      }
    }
  }

 private:
  // Sums of scaled products, and the scales in flight: each thread brings those of one row of A into shared memory.
  template <class Scales>
  struct ScaledSums {
    static constexpr int kValues = kIsScaled ? Matrix::kValues : 1;
    float first[kValues], second[kValues];
    const float *of_row = nullptr, *of_columns[2];
    float next = 0;

    MOE_A2A_DEVICE ScaledSums(const Block& block, const Scales& scales) {
      if constexpr (kIsScaled) {
        MOE_A2A_UNROLL
        for (int v = 0; v < kValues; ++v) first[v] = second[v] = 0;
        if (block.rank() < kRows) of_row = scales.of_row(block.rank());
        if (of_row != nullptr) next = of_row[0];
        for (int half = 0; half < 2; ++half) of_columns[half] = scales.of_columns(half);
      }
    }
    MOE_A2A_DEVICE void store_scale(Shared& shared, const Block& block, int i, bool has_next) {
      if (block.rank() < kRows) shared.scale[i % 2][block.rank()] = next;
      if (of_row != nullptr && has_next) next = of_row[i + 1];
    }
    MOE_A2A_DEVICE void add(const Shared& shared, const Block& block, int i, int warp_row, Matrix& a, Matrix& b) {
      const float a_columns = of_columns[0][i], b_columns = of_columns[1][i];
      MOE_A2A_UNROLL
      for (int v = 0; v < kValues; ++v) {
        const float scale = load_shared(&shared.scale[i % 2][warp_row + Matrix::row_of(block.warp(), v)]);
        first[v] += a.value[v] * (scale * a_columns);
        second[v] += b.value[v] * (scale * b_columns);
      }
      a.clear();
      b.clear();
    }
  };

  MOE_A2A_DEVICE static bool is_row(int row) { return kAllPieces % kBlockThreads == 0 || row < kRows + 2 * kColumns; }
  MOE_A2A_DEVICE static int row_of_piece(const Block& block, int p) {
    return (p * kBlockThreads + block.rank()) / kPiecesOfRow;
  }
  MOE_A2A_DEVICE static int offset_of_piece(const Block& block) { return block.rank() % kPiecesOfRow * kPieceElements; }
  MOE_A2A_DEVICE static void load(const Block& block, Vec16 (&piece)[kPieces], const T* const (&source)[kPieces],
                                  int begin, int depth) {
    const bool in_depth = begin + offset_of_piece(block) < depth;
    MOE_A2A_UNROLL
    for (int p = 0; p < kPieces; ++p) {
      piece[p] = Vec16{};
      if (source[p] != nullptr && in_depth) piece[p] = load_global(reinterpret_cast<const Vec16*>(source[p] + begin));
    }
  }
  MOE_A2A_DEVICE static void store_pieces(const Block& block, Step& step, const Vec16 (&piece)[kPieces]) {
    MOE_A2A_UNROLL
    for (int p = 0; p < kPieces; ++p) {
      const int row = row_of_piece(block, p);
      if (!is_row(row)) continue;
      Staged* to = (row < kRows ? step.a[row] : step.b[row - kRows]) + offset_of_piece(block);
      if constexpr (kIsScaled) {
        *reinterpret_cast<Vec16*>(to) = {widen(piece[p].x, 0), widen(piece[p].x, 16), widen(piece[p].y, 0),
                                         widen(piece[p].y, 16)};
        *reinterpret_cast<Vec16*>(to + 8) = {widen(piece[p].z, 0), widen(piece[p].z, 16), widen(piece[p].w, 0),
                                             widen(piece[p].w, 16)};
      } else {
        *reinterpret_cast<Vec16*>(to) = piece[p];
      }
    }
  }
  // Two float8 of a word, from bit `first` on, as bfloat16. Exact.
  MOE_A2A_DEVICE static uint32_t widen(uint32_t word, int first) {
    const auto bits = [&](int bit) {
      return std::bit_cast<uint32_t>(to_float(Float8{static_cast<uint8_t>(word >> bit)}));
    };
    return bits(first) >> 16 | (bits(first + 8) & 0xffff0000u);
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
