// How a multiplying warp of the pipelined GEMM turns its sums of a float8 tile of few rows into results and stores
// them: kNumRows rows and 16 columns of each half of the tile.
#pragma once

#include "moe/experts/grouped_gemm.h"
#include "moe/experts/result_place.h"

#if defined(MOE_A2A_HAS_TILE_PIPELINE)

namespace moe_a2a::inline MOE_A2A_TARGET {

template <bool kGated, int kNumRows>
struct FewRowsResults {
  using Memory = PipelineMemory;
  using Matrix = FewRowsMatrix<kNumRows, Memory::kHalfBytes>;
  static constexpr int kColumns = 16, kHalves = kGated ? 1 : 2;  // of results
  // The sums pass through shared memory. A lane then has kSets sets of 8 neighbouring columns of a row.
  static constexpr int kSetsOfRow = kHalves * kColumns / 8, kSets = kNumRows * kSetsOfRow / kWarpSize;
  static constexpr int kRowBytes = 2 * kColumns * 4;  // of both halves
  static_assert(kNumRows * kRowBytes <= Memory::kWarpRows * Memory::kResultRowBytes);

  MOE_A2A_DEVICE static void store(const GroupedGemmArgs& args, const Memory& memory, const Matrix& matrix,
                                   const ResultPlace& place) {
    stage_sums(matrix, place);
    if constexpr (kGated) {
      if (args.out_dtype == DType::kFloat8) return store_quantized(args, memory, place);
    }
    with_function(args.activation, [&](auto f) {
      MOE_A2A_ROLLED
      for (int i = 0; i < kSets; ++i) {
        const Set set(args, place, i);
        if (!set.is_there) continue;
        float v[8];
        set.finish(args, place, f, v);
        uint32_t packed[4];
        MOE_A2A_UNROLL
        for (int p = 0; p < 4; ++p) packed[p] = pack_results<Float8>(args, v[2 * p], v[2 * p + 1]);
        store_values(reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(args.out) + set.at), packed);
      }
    });
    warp_sync();
  }

 private:
  // Of a row, both halves; 16-byte pieces are permuted by the row, so that the rows of a column cover all banks.
  MOE_A2A_DEVICE static StagedRow staged_row(uint32_t memory, int row) {
    return {memory + row * kRowBytes, static_cast<uint32_t>(row % 8 << 4)};
  }

  MOE_A2A_DEVICE static void stage_sums(const Matrix& matrix, const ResultPlace& place) {
    MOE_A2A_UNROLL
    for (int half = 0; half < 2; ++half) {
      MOE_A2A_UNROLL
      for (int i = 0; i < Matrix::kCount; ++i) {
        const StagedRow to = staged_row(place.memory, Matrix::row_of(i));
        store_float(to.at((half * kColumns + Matrix::column_of(i)) * 4), matrix.sum[half][i]);
      }
    }
    warp_sync();
  }

  // The i-th set of a lane.
  struct Set {
    int row, half, first, column;  // first: of the warp's columns
    bool is_there;
    int64_t at;  // in out

    MOE_A2A_DEVICE Set(const GroupedGemmArgs& args, const ResultPlace& place, int i) {
      const int number = i * kWarpSize + Warp{}.rank();
      row = number / kSetsOfRow;
      half = number % kSetsOfRow / 2;
      first = number % 2 * 8;
      column = place.first_column + half * Memory::kHalfColumns + first;
      is_there = row < place.num_rows && column < args.num_columns;
      at = int64_t{place.first_position + row} * args.num_columns + column;
    }

    template <class Function>
    MOE_A2A_DEVICE void finish(const GroupedGemmArgs& args, const ResultPlace& place, Function f, float (&v)[8]) const {
      const StagedRow from = staged_row(place.memory, row);
      const float* bias = args.bias == nullptr ? nullptr : args.bias + place.expert * args.rows_of_w();
      MOE_A2A_UNROLL
      for (int c = 0; c < 8; ++c) {
        const auto sum = [&](int of_half, int of_up) MOE_A2A_INLINED {
          const float s = load_float(from.at((of_half * kColumns + first + c) * 4));
          return bias == nullptr ? s : s + bias[args.row_of_w(of_up, column + c)];
        };
        if constexpr (kGated) {
          v[c] = gated(args.activation, f, sum(0, 0), sum(1, 1));
        } else {
          v[c] = f(sum(half, 0));
        }
      }
    }
  };

  // SwiGLU as float8: all multiplying warps have columns of the row that share its scale.
  MOE_A2A_DEVICE static void store_quantized(const GroupedGemmArgs& args, const Memory& memory,
                                             const ResultPlace& place) {
    const ScaledSilu f{args.activation.alpha};
    float v[kSets][8], largest[kSets];
    MOE_A2A_UNROLL
    for (int i = 0; i < kSets; ++i) {
      Set(args, place, i).finish(args, place, f, v[i]);
      largest[i] = 1e-12f;  // as in rows/quantize.h
      MOE_A2A_UNROLL
      for (int c = 0; c < 8; ++c) largest[i] = larger(fabsf(v[i][c]), largest[i]);
      largest[i] = Warp{}.max_of_neighbours<2>(largest[i]);
    }
    warp_sync();  // all have read their sums, so the memory may hold the largest values
    MOE_A2A_UNROLL
    for (int i = 0; i < kSets; ++i) {
      const Set set(args, place, i);
      if (set.first == 0) store_float(place.memory + set.row * 4, largest[i]);
    }
    sync_threads<Memory::kMultiplyWarps * kWarpSize>();
    MOE_A2A_UNROLL
    for (int i = 0; i < kSets; ++i) {
      const Set set(args, place, i);
      MOE_A2A_UNROLL
      for (int warp = 0; warp < Memory::kMultiplyWarps; ++warp) {
        largest[i] = larger(load_float(memory.results(warp) + set.row * 4), largest[i]);
      }
      if (!set.is_there) continue;
      Float8 quantized[8];
      to_float8(v[i], kFloat8Max / largest[i], quantized);
      store_values(static_cast<Float8*>(args.out) + set.at, quantized);
      const int scale = set.column / 128;
      if (set.column % 128 == 0) {
        args.out_scales[int64_t{place.first_position + set.row} * args.column_blocks() + scale] =
            largest[i] / kFloat8Max;
      }
    }
    sync_threads<Memory::kMultiplyWarps * kWarpSize>();
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET

#endif
