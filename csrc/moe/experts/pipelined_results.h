// How a multiplying warp of the pipelined GEMM turns its sums into results and stores them: 16 rows of a tile.
#pragma once

#include "moe/experts/grouped_gemm.h"
#include "moe/experts/result_place.h"

#if defined(MOE_A2A_HAS_TILE_PIPELINE)

namespace moe_a2a::inline MOE_A2A_TARGET {

template <class T, bool kGated>
struct PipelinedResults {
  using Memory = PipelineMemory;
  using Matrix = WarpGroupMatrix<T>;
  static constexpr bool kIsFloat8 = std::is_same_v<T, Float8>;
  static constexpr int kOutColumns = kGated ? Memory::kHalfColumns : Memory::kTileColumns;

  MOE_A2A_DEVICE static void store(const GroupedGemmArgs& args, Matrix& matrix, const ResultPlace& place) {
    if (kIsFloat8 && kGated && args.out_dtype == DType::kFloat8) {
      if constexpr (kIsFloat8 && kGated) store_quantized(args, matrix, place);
    } else if (args.bias == nullptr && args.activation.is_plain()) {
      store_plain(args, matrix, place);
    } else {
      store_finished(args, matrix, place);
    }
  }

  // The identity, or silu(gate) * up. Results pass through shared memory, 128 columns at a time, so that rows are
  // stored in whole lines.
  MOE_A2A_DEVICE static void store_plain(const GroupedGemmArgs& args, const Matrix& matrix, const ResultPlace& place) {
    constexpr int kHalf = 16;  // groups of 8 columns per half
    const int lane = Warp{}.rank(), row = lane / 16, piece = lane % 16;
    const StagedRow to = Memory::staged_row(place.memory, lane % 16);
    const int first_column = place.first_column + piece * 8;
    uint16_t* out =
        static_cast<uint16_t*>(args.out) + (int64_t{place.first_position} + row) * args.num_columns + first_column;
    MOE_A2A_UNROLL
    for (int half = 0; half < kOutColumns / Memory::kHalfColumns; ++half) {
      MOE_A2A_UNROLL
      for (int j = 0; j < kHalf; j += 2) {
        uint32_t v[4];
        MOE_A2A_UNROLL
        for (int q = 0; q < 4; ++q) v[q] = result(args, matrix, half * kHalf + j + q / 2, q % 2 != 0);
        store_matrices(to.at((j + lane / 16) * 16), v);
      }
      warp_sync();
      const bool is_column = first_column + half * Memory::kHalfColumns < args.num_columns;
      Vec16 v[8];
      MOE_A2A_UNROLL
      for (int i = 0; i < 8; ++i) {
        v[i] = load_vector(Memory::staged_row(place.memory, 2 * i + row).at(piece * 16));
      }
      MOE_A2A_UNROLL
      for (int i = 0; i < 8; ++i) {
        if (!is_column || 2 * i + row >= place.num_rows) continue;
        *reinterpret_cast<Vec16*>(out + 2 * i * int64_t{args.num_columns} + half * Memory::kHalfColumns) = v[i];
      }
      warp_sync();
    }
  }

  // Two neighbouring values of column group j (8 columns).
  MOE_A2A_DEVICE static uint32_t result(const GroupedGemmArgs& args, const Matrix& matrix, int j, bool lower) {
    const int i = Matrix::index(j, lower);
    if constexpr (kGated) {
      const int up = i + 64;  // 128 columns further
      return pack_results<T>(args, silu(matrix.sum[i]) * matrix.sum[up], silu(matrix.sum[i + 1]) * matrix.sum[up + 1]);
    } else {
      return pack_results<T>(args, matrix.sum[i], matrix.sum[i + 1]);
    }
  }

  // Any activation, and bias. The sums pass through shared memory, 64 columns of w at a time, and a loop over rows
  // finishes them: unrolled over registers, this took a minute to compile and spilled.
  MOE_A2A_DEVICE static void store_finished(const GroupedGemmArgs& args, const Matrix& matrix,
                                            const ResultPlace& place) {
    constexpr int kColumns = kGated ? 32 : 64, kGroups = kColumns / 8;  // results, and groups of 8, at a time
    constexpr int kRows = kWarpSize / kGroups;                          // a lane takes a group in every kRows-th row
    static_assert(64 * 4 <= Memory::kResultRowBytes);
    const int lane = Warp{}.rank(), group = lane % kGroups, row = lane / kGroups;
    const StagedRow upper_row = Memory::staged_row(place.memory, lane / 4);
    const StagedRow lower_row = Memory::staged_row(place.memory, lane / 4 + 8);
    MOE_A2A_UNROLL
    for (int pass = 0; pass < kOutColumns / kColumns; ++pass) {
      MOE_A2A_UNROLL
      for (int g = 0; g < 8; ++g) {
        const int j = pass * kGroups + g % kGroups + g / kGroups * 16;
        const uint32_t to = g * 32 + lane % 4 * 8;
        const float* upper = matrix.sum + Matrix::index(j, false);
        const float* lower = matrix.sum + Matrix::index(j, true);
        store_pair(upper_row.at(to), upper[0], upper[1]);
        store_pair(lower_row.at(to), lower[0], lower[1]);
      }
      warp_sync();
      const int column = place.first_column + pass * kColumns + group * 8;
      if (column < args.num_columns) {
        const Finish finish(args, place.expert, column);
        uint16_t* out = static_cast<uint16_t*>(args.out) + int64_t{place.first_position} * args.num_columns + column;
        with_function(args.activation, [&](auto f) {
          MOE_A2A_ROLLED
          for (int i = 0; i < Memory::kWarpRows && row + i < place.num_rows; i += kRows) {
            const Vec16 v = finish.results(f, Memory::staged_row(place.memory, row + i), group * 32);
            *reinterpret_cast<Vec16*>(out + int64_t{row + i} * args.num_columns) = v;
          }
        });
      }
      warp_sync();
    }
  }

  // Turns the sums of 8 neighbouring columns into results.
  struct Finish {
    const GroupedGemmArgs& args;
    float bias[kGated ? 2 : 1][8];

    MOE_A2A_DEVICE Finish(const GroupedGemmArgs& args, int expert, int column) : args(args) {
      MOE_A2A_UNROLL
      for (int half = 0; half < (kGated ? 2 : 1); ++half) {
        MOE_A2A_UNROLL
        for (int c = 0; c < 8; ++c) {
          const int64_t row = expert * args.rows_of_w() + args.row_of_w(half, column + c);
          bias[half][c] = args.bias == nullptr ? 0.0f : args.bias[row];
        }
      }
    }

    // byte: where the sums of the columns begin in the row; those of up come 32 columns later.
    template <class Function>
    MOE_A2A_DEVICE Vec16 results(Function f, const StagedRow& from, uint32_t byte) const {
      uint32_t word[4];
      MOE_A2A_UNROLL
      for (int i = 0; i < 4; ++i) {
        word[i] =
            pack_results<T>(args, result(f, from, byte + i * 8, 2 * i), result(f, from, byte + i * 8 + 4, 2 * i + 1));
      }
      return {word[0], word[1], word[2], word[3]};
    }
    template <class Function>
    MOE_A2A_DEVICE float result(Function f, const StagedRow& from, uint32_t byte, int c) const {
      const float sum = load_float(from.at(byte)) + bias[0][c];
      if constexpr (kGated) {
        return gated(args.activation, f, sum, load_float(from.at(byte + 32 * 4)) + bias[1][c]);
      } else {
        return f(sum);
      }
    }
  };

  // SwiGLU as float8: a row's results of a tile share one scale.
  MOE_A2A_DEVICE static void store_quantized(const GroupedGemmArgs& args, Matrix& matrix, const ResultPlace& place) {
    const ScaledSilu f{args.activation.alpha};
    float largest[2] = {1e-12f, 1e-12f}, inverse[2];  // of a thread's upper and lower row; as in rows/quantize.h
    MOE_A2A_UNROLL
    for (int i = 0; i < 64; ++i) {
      matrix.sum[i] = gated(args.activation, f, matrix.sum[i], matrix.sum[i + 64]);
      largest[i / 2 % 2] = larger(fabsf(matrix.sum[i]), largest[i / 2 % 2]);
    }
    MOE_A2A_UNROLL
    for (int r = 0; r < 2; ++r) {
      largest[r] = Warp{}.max_of_neighbours<4>(largest[r]);
      inverse[r] = kFloat8Max / largest[r];
    }
    const int lane = Warp{}.rank();
    const StagedRow staged[2] = {Memory::staged_row(place.memory, lane / 4),
                                 Memory::staged_row(place.memory, lane / 4 + 8)};
    MOE_A2A_UNROLL
    for (int j = 0; j < 16; ++j) {
      MOE_A2A_UNROLL
      for (int r = 0; r < 2; ++r) {
        const float* sum = matrix.sum + Matrix::index(j, r == 1);
        Float8 pair[2];
        to_float8({sum[0], sum[1]}, inverse[r], pair);
        store_bytes(staged[r].at(j * 8 + lane % 4 * 2), pair[0].bits, pair[1].bits);
      }
    }
    const int block = place.first_column / kOutColumns;
    if (lane % 4 == 0) {
      for (int r = 0; r < 2; ++r) {
        const int row = lane / 4 + 8 * r;
        if (row >= place.num_rows || block >= args.column_blocks()) continue;  // past the last column, too
        args.out_scales[int64_t{place.first_position + row} * args.column_blocks() + block] = largest[r] / kFloat8Max;
      }
    }
    warp_sync();
    const int column = place.first_column + lane % 8 * 16;
    auto* out = static_cast<Float8*>(args.out) + int64_t{place.first_position} * args.num_columns + column;
    MOE_A2A_UNROLL
    for (int row = lane / 8; row < Memory::kWarpRows; row += 4) {
      if (column >= args.num_columns || row >= place.num_rows) continue;
      const Vec16 v = load_vector(Memory::staged_row(place.memory, row).at(lane % 8 * 16));
      *reinterpret_cast<Vec16*>(out + int64_t{row} * args.num_columns) = v;
    }
    warp_sync();
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET

#endif
