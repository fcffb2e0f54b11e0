// The BlockTile of the GPU targets, built on the target's WarpMatrix: both operands go through shared memory, while the
// pieces of the next step are loaded into registers. See block_tile.h.
#pragma once

namespace moe_a2a::inline MOE_A2A_TARGET {

template <class T>
struct BlockTile {
 private:
  using Matrix = WarpMatrix<T>;
  static constexpr int kWarps = kBlockThreads / kWarpSize;
  static constexpr int kRowWarps = kWarps >= 8 ? 4 : 2, kColumnWarps = kWarps / kRowWarps;

 public:
  static constexpr int kRows = kRowWarps * Matrix::kRows, kColumns = kColumnWarps * Matrix::kColumns;

 private:
  static constexpr int kDepth = 32;           // summed per step
  static constexpr int kStride = kDepth + 8;  // of a row in shared memory: spreads rows over the banks
  static constexpr int kPieceElements = 16 / sizeof(T), kPiecesOfRow = kDepth / kPieceElements;
  static constexpr int kPieces = (kRows + 2 * kColumns) * kPiecesOfRow / kBlockThreads;  // per thread
  static_assert((kRows + 2 * kColumns) * kPiecesOfRow % kBlockThreads == 0);
  struct Step {
    T a[kRows][kStride], b[2 * kColumns][kStride];
  };

 public:
  static constexpr int64_t kSharedBytes = 2 * sizeof(Step);

  template <class RowOfA, class RowOfB, class Store>
  MOE_A2A_DEVICE static void multiply(const Block& block, std::byte* shared, int num_rows, int depth, RowOfA row_of_a,
                                      RowOfB row_of_b, Store store) {
    Step* steps = reinterpret_cast<Step*>(shared);
    const T* source[kPieces];  // of this thread's pieces in each step
    MOE_A2A_UNROLL
    for (int p = 0; p < kPieces; ++p) {
      const int row = row_of_piece(block, p);
      const T* begin = row < kRows ? row_of_a(row) : row_of_b((row - kRows) / kColumns, (row - kRows) % kColumns);
      source[p] = begin == nullptr ? nullptr : begin + offset_of_piece(block);
    }
    const int warp_row = block.warp_rank() / kColumnWarps * Matrix::kRows;
    const int warp_column = block.warp_rank() % kColumnWarps * Matrix::kColumns;
    Matrix first, second;
    first.clear();
    second.clear();
    const int num_steps = (depth + kDepth - 1) / kDepth;
    Vec16 piece[kPieces];
    load(block, piece, source, 0, depth);
    for (int s = 0; s < num_steps; ++s) {
      Step& step = steps[s % 2];  // read two steps ago, before the previous step's barrier
      store_pieces(block, step, piece);
      if (s + 1 < num_steps) load(block, piece, source, (s + 1) * kDepth, depth);
      block.sync();
      if (warp_row < num_rows) {
        first.add_product(block.warp(), step.a[warp_row], step.b[warp_column], kStride, kDepth);
        second.add_product(block.warp(), step.a[warp_row], step.b[kColumns + warp_column], kStride, kDepth);
      }
    }
    block.sync();  // the next tile overwrites what the last step reads
    MOE_A2A_UNROLL
    for (int v = 0; v < Matrix::kValues; ++v) {
      store(warp_row + Matrix::row_of(block.warp(), v), warp_column + Matrix::column_of(block.warp(), v),
            first.value[v], second.value[v]);
    }
  }

 private:
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
      T* to = row < kRows ? step.a[row] : step.b[row - kRows];
      *reinterpret_cast<Vec16*>(to + offset_of_piece(block)) = piece[p];
    }
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
