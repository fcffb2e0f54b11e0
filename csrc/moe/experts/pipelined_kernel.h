// The grouped GEMM as a pipeline of warps, for targets with the primitives of arch/cuda_tile_pipeline.h.
//
// A cluster of two blocks takes a unit of work: two tiles of 128 rows that share a tile of weights, half of which each
// block loads for both. In a block, two warps gather rows of x through the list, one loads weights, one hands the
// gathered rows to the products, and two warp groups multiply, apply the activation and store. Stages in shared memory
// connect them.
#pragma once

#include "moe/experts/grouped_gemm.h"
#include "moe/experts/pipeline_memory.h"

#if defined(MOE_A2A_HAS_TILE_PIPELINE)

namespace moe_a2a::inline MOE_A2A_TARGET {

template <class T, bool kGated, bool kGathers>
struct PipelinedGemm {
  using Memory = PipelineMemory;
  using Matrix = WarpGroupMatrix<T>;
  // Gate and up of the same columns are side by side, so each thread has both, whatever the order of the weights.
  static constexpr int kOutColumns = kGated ? Memory::kHalfColumns : Memory::kTileColumns;
  using Tiles = ExpertTiles<PairedTiles, Memory::kTileRows, kOutColumns>;

  struct Args {
    GroupedGemmArgs gemm;
    TensorMap w;  // [num_experts, 1 or 2 (gate, up), num_columns, depth], boxes of half a tile's columns
    TensorMap x;  // [num_x_rows, depth], boxes of a tile's rows; unused when rows are gathered
  };
  static constexpr const char* kName = "pipelined_gemm";
  static constexpr int kThreads = 384, kBlocks = PairedTiles::kBlocks, kSharedBytes = Memory::kBytes;
  static constexpr int kGatherWarps = 2, kLoaderWarp = 2, kPassWarp = 3, kMultiplyWarps = 8;
  static constexpr int kGatherThreads = kGatherWarps * kWarpSize;
  // Each thread starts with 168 registers; the loading warps give some to the multiplying ones.
  static constexpr int kLoadRegisters = 88, kMultiplyRegisters = 208;
  static_assert(128 * kLoadRegisters + 256 * kMultiplyRegisters <= kThreads * 168);

  MOE_A2A_DEVICE static void run(const Args& args, uint32_t shared) {
    const Memory memory{shared};
    const int warp = thread_in_block() / kWarpSize, block = block_in_cluster();
    if (thread_in_block() == 0) init_barriers(memory);
    block_sync();
    cluster_sync();
    if (warp < 4) {
      give_registers<kLoadRegisters>();
      if (kGathers && warp < kGatherWarps) gather_rows(args.gemm, memory, block);
      if (warp == kLoaderWarp) load_tiles(args, memory, block);
      if (kGathers && warp == kPassWarp) pass_on(args.gemm, memory, block);
    } else {
      take_registers<kMultiplyRegisters>();
      multiply(args.gemm, memory, block);
    }
    warp_sync();
    cluster_sync();  // the other block may still arrive at this one's barriers
  }

  MOE_A2A_DEVICE static void init_barriers(const Memory& memory) {
    for (int s = 0; s < Memory::kStages; ++s) {
      barrier_init(memory.full(s), kGathers ? 2 : 1);
      barrier_init(memory.empty(s), kMultiplyWarps * kBlocks);
      barrier_init(memory.landed(s), kGatherThreads);
    }
    constexpr int kReaders = kMultiplyWarps + 1 + (kGathers ? kGatherWarps + 1 : 0);
    for (int place = 0; place < 2; ++place) {
      barrier_init(memory.unit_full(place), 1);
      barrier_init(memory.unit_empty(place), kReaders * kBlocks);
    }
    fence_barrier_init();
  }

  MOE_A2A_DEVICE static int num_steps(const GroupedGemmArgs& args) { return div_up(args.depth, Memory::kTileDepth); }

  // ---- rows of x, by 16-byte copies straight into the swizzled tile. Eight threads per row.

  static constexpr int kRowStep = kGatherThreads / 8, kCopies = Memory::kTileRows / kRowStep;

  MOE_A2A_DEVICE static void gather_rows(const GroupedGemmArgs& args, const Memory& memory, int block) {
    const int piece = thread_in_block() % 8, first_row = thread_in_block() % kGatherThreads / 8;
    const uint32_t place = first_row * Memory::kRowBytes + ((piece ^ (first_row % 8)) << 4);
    StageRing ring;
    UnitReader units(memory);
    Tiles tiles(args, Warp{});
    while (tiles.seek(units.next(Warp{}), block)) {
      const char* source[kCopies];
      uint32_t is_row = 0;
      MOE_A2A_UNROLL
      for (int i = 0; i < kCopies; ++i) {
        const int at = first_row + kRowStep * i;
        const int row = at < tiles.num_positions ? row_of_position(args, tiles.first_position + at) : -1;
        if (row >= 0) is_row |= 1u << i;
        source[i] = reinterpret_cast<const char*>(static_cast<const T*>(args.x) + (row < 0 ? 0 : row) * args.x_stride +
                                                  piece * 8);
      }
      const bool all_rows = !Warp{}.any(is_row != (1u << kCopies) - 1);
      // A warp group with any row multiplies all of its rows, so all are written: missing rows as zeros, which cost the
      // least power.
      const int num_copies = div_up(tiles.num_positions, Matrix::kRows) * (Matrix::kRows / kRowStep);
      for (int step = 0; step < num_steps(args); ++step) {
        const uint32_t to = memory.rows(ring.stage) + place;
        const int depth = args.depth - step * Memory::kTileDepth;
        barrier_wait(memory.empty(ring.stage), ring.parity ^ 1);
        if (all_rows && depth >= Memory::kTileDepth) {
          MOE_A2A_UNROLL
          for (int i = 0; i < kCopies; ++i) copy_vector(to + i * kRowStep * Memory::kRowBytes, source[i]);
        } else {
          MOE_A2A_UNROLL
          for (int i = 0; i < kCopies; ++i) {
            if (i >= num_copies) continue;
            const bool is_there = piece * 8 < depth && (is_row >> i & 1) != 0;
            copy_vector_or_zeros(to + i * kRowStep * Memory::kRowBytes, source[i], is_there);
          }
        }
        MOE_A2A_UNROLL
        for (int i = 0; i < kCopies; ++i) source[i] += Memory::kRowBytes;
        barrier_arrive_after_copies(memory.landed(ring.stage));
        ring.advance();
      }
    }
  }

  // Gathered rows are written through the generic proxy and read by the products through the async proxy; this is the
  // fence between. It has its own warp, with nothing else in flight: in the multiplying warps it would wait for their
  // arrivals at the other block.
  MOE_A2A_DEVICE static void pass_on(const GroupedGemmArgs& args, const Memory& memory, int block) {
    StageRing ring;
    UnitReader units(memory);
    Tiles tiles(args, Warp{});
    while (tiles.seek(units.next(Warp{}), block)) {
      for (int step = 0; step < num_steps(args); ++step) {
        barrier_wait(memory.landed(ring.stage), ring.parity);
        fence_before_async_reads();
        if (Warp{}.rank() == 0) barrier_arrive(memory.full(ring.stage));
        warp_sync();
        ring.advance();
      }
    }
  }

  // ---- weights, and rows of x that are contiguous, by TMA

  MOE_A2A_DEVICE static void load_tiles(const Args& args, const Memory& memory, int block) {
    StageRing ring;
    UnitReader units(memory);
    UnitTaker taker(memory, args.gemm.next_unit, block);
    Tiles tiles(args.gemm, Warp{});
    while (tiles.seek(units.next(Warp{}), block)) {
      for (int step = 0; step < num_steps(args.gemm); ++step) {
        barrier_wait(memory.empty(ring.stage), ring.parity ^ 1);
        if (Warp{}.rank() == 0) {
          load_stage(args, memory, block, tiles, ring.stage, step * Memory::kTileDepth);
          if (step == 0) taker.take();
        }
        warp_sync();
        ring.advance();
      }
    }
  }

  MOE_A2A_DEVICE static void load_stage(const Args& args, const Memory& memory, int block, const Tiles& tiles,
                                        int stage, int depth) {
    const uint32_t full = memory.full(stage), columns = memory.columns(stage);
    constexpr int kHalfBytes = Memory::kColumnsBytes / 2;
    const auto column = [&](int half) {
      return tiles.column_tile * kOutColumns + (kGated ? 0 : half * Memory::kHalfColumns);
    };
    barrier_expect(full, Memory::kColumnsBytes + (kGathers ? 0 : Memory::kRowsBytes));
    if (tiles.shares_columns) {
      load_tile_for_both(columns + block * kHalfBytes, &args.w, full, depth, column(block), kGated ? block : 0,
                         tiles.expert);
    } else {
      for (int half = 0; half < 2; ++half) {
        load_tile(columns + half * kHalfBytes, &args.w, full, depth, column(half), kGated ? half : 0, tiles.expert);
      }
    }
    if (!kGathers) load_tile(memory.rows(stage), &args.x, full, depth, tiles.first_position);
  }

  // ---- products

  MOE_A2A_DEVICE static void multiply(const GroupedGemmArgs& args, const Memory& memory, int block) {
    const int warp = thread_in_block() / kWarpSize - 4, group = warp / 4;
    const auto release = [&](int stage) {
      if (Warp{}.rank() < kBlocks) barrier_arrive_at(memory.empty(stage), Warp{}.rank());
    };
    StageRing ring;
    UnitReader units(memory);
    Tiles tiles(args, Warp{});
    bool more = tiles.seek(units.next(Warp{}), block);
    while (more) {
      if (tiles.num_positions <= group * Matrix::kRows) {  // this group has no rows: just release the stages
        for (int step = 0; step < num_steps(args); ++step, ring.advance()) {
          barrier_wait(memory.full(ring.stage), ring.parity);
          release(ring.stage);
        }
        more = tiles.seek(units.next(Warp{}), block);
        continue;
      }
      const int first_row = group * Matrix::kRows + warp % 4 * Memory::kWarpRows;
      const int first_position = tiles.first_position + first_row, num_rows = tiles.num_positions - first_row;
      const int first_column = tiles.column_tile * kOutColumns, expert = tiles.expert;
      Matrix matrix;
      int previous = -1;
      for (int step = 0; step < num_steps(args); ++step, ring.advance()) {
        barrier_wait(memory.full(ring.stage), ring.parity);
        matrix.start(memory.rows(ring.stage) + group * Matrix::kRows * Memory::kRowBytes, memory.columns(ring.stage),
                     step == 0);
        matrix.template wait<1>();
        if (previous >= 0) release(previous);
        previous = ring.stage;
      }
      more = tiles.seek(units.next(Warp{}), block);  // overlaps the last product
      matrix.template wait<0>();
      release(previous);
      const Place place = {memory.results(warp), expert, first_position, num_rows, first_column};
      if (args.bias == nullptr && args.activation.is_plain()) {
        store(args, matrix, place);
      } else {
        store_finished(args, matrix, place);
      }
    }
  }

  // ---- results

  struct Place {  // of the 16 rows and kOutColumns columns that a warp stores
    uint32_t memory;
    int expert, first_position, num_rows, first_column;
  };

  // Stores what needs no more than silu(gate) * up, through shared memory, so that each row leaves in whole lines; 128
  // columns at a time.
  MOE_A2A_DEVICE static void store(const GroupedGemmArgs& args, const Matrix& matrix, const Place& place) {
    constexpr int kHalf = 16;  // groups of 8 columns per half
    const int lane = Warp{}.rank(), row = lane / 16, piece = lane % 16;
    const uint32_t corner = place.memory + lane % 16 * Memory::kResultRowBytes + lane / 16 * 16;
    const int first_column = place.first_column + piece * 8;
    T* out = static_cast<T*>(args.out) + (int64_t{place.first_position} + row) * args.num_columns + first_column;
    MOE_A2A_UNROLL
    for (int half = 0; half < kOutColumns / Memory::kHalfColumns; ++half) {
      MOE_A2A_UNROLL
      for (int j = 0; j < kHalf; j += 2) {
        uint32_t v[4];
        MOE_A2A_UNROLL
        for (int q = 0; q < 4; ++q) v[q] = result(matrix, half * kHalf + j + q / 2, q % 2 != 0);
        store_matrices(corner + j * 16, v);
      }
      warp_sync();
      const bool is_column = first_column + half * Memory::kHalfColumns < args.num_columns;
      Vec16 v[8];
      MOE_A2A_UNROLL
      for (int i = 0; i < 8; ++i) {
        v[i] = load_vector(place.memory + (2 * i + row) * Memory::kResultRowBytes + piece * 16);
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
  MOE_A2A_DEVICE static uint32_t result(const Matrix& matrix, int j, bool lower) {
    const int i = Matrix::index(j, lower);
    if constexpr (kGated) {
      const int up = i + 64;  // 128 columns further
      return pack<T>(silu(matrix.sum[i]) * matrix.sum[up], silu(matrix.sum[i + 1]) * matrix.sum[up + 1]);
    } else {
      return pack<T>(matrix.sum[i], matrix.sum[i + 1]);
    }
  }

  // Any activation, and bias. The sums themselves pass through shared memory, 64 columns of w at a time, and the rest
  // is a loop over rows: as code for each register it took a minute to compile, and spilled.
  MOE_A2A_DEVICE static void store_finished(const GroupedGemmArgs& args, const Matrix& matrix, const Place& place) {
    constexpr int kColumns = kGated ? 32 : 64, kGroups = kColumns / 8;  // results, and groups of 8, at a time
    constexpr int kRows = kWarpSize / kGroups;                          // a lane takes a group in every kRows-th row
    static_assert(64 * 4 <= Memory::kResultRowBytes);
    const int lane = Warp{}.rank(), group = lane % kGroups, row = lane / kGroups;
    const uint32_t from = place.memory + row * Memory::kResultRowBytes + group * 32;
    MOE_A2A_UNROLL
    for (int pass = 0; pass < kOutColumns / kColumns; ++pass) {
      MOE_A2A_UNROLL
      for (int g = 0; g < 8; ++g) {
        const int j = pass * kGroups + g % kGroups + g / kGroups * 16;
        const uint32_t to = place.memory + lane / 4 * Memory::kResultRowBytes + g * 32 + lane % 4 * 8;
        const float* upper = matrix.sum + Matrix::index(j, false);
        const float* lower = matrix.sum + Matrix::index(j, true);
        store_pair(to, upper[0], upper[1]);
        store_pair(to + 8 * Memory::kResultRowBytes, lower[0], lower[1]);
      }
      warp_sync();
      const int column = place.first_column + pass * kColumns + group * 8;
      if (column < args.num_columns) {
        const Finish finish(args, place.expert, column);
        T* out = static_cast<T*>(args.out) + int64_t{place.first_position} * args.num_columns + column;
        with_function(args.activation, [&](auto f) {
          MOE_A2A_ROLLED
          for (int i = 0; i < Memory::kWarpRows && row + i < place.num_rows; i += kRows) {
            const Vec16 v = finish.results(f, from + i * Memory::kResultRowBytes);
            *reinterpret_cast<Vec16*>(out + int64_t{row + i} * args.num_columns) = v;
          }
        });
      }
      warp_sync();
    }
  }

  // Turns the sums of 8 neighbouring columns into results.
  struct Finish {
    const Activation& activation;
    float bias[kGated ? 2 : 1][8];

    MOE_A2A_DEVICE Finish(const GroupedGemmArgs& args, int expert, int column) : activation(args.activation) {
      MOE_A2A_UNROLL
      for (int half = 0; half < (kGated ? 2 : 1); ++half) {
        MOE_A2A_UNROLL
        for (int c = 0; c < 8; ++c) {
          const int64_t row = expert * args.rows_of_w() + args.row_of_w(half, column + c);
          bias[half][c] = args.bias == nullptr ? 0.0f : args.bias[row];
        }
      }
    }

    // from: the sums of the columns; those of up come 32 columns later.
    template <class Function>
    MOE_A2A_DEVICE Vec16 results(Function f, uint32_t from) const {
      uint32_t word[4];
      MOE_A2A_UNROLL
      for (int i = 0; i < 4; ++i) {
        word[i] = pack<T>(result(f, from + i * 8, 2 * i), result(f, from + i * 8 + 4, 2 * i + 1));
      }
      return {word[0], word[1], word[2], word[3]};
    }
    template <class Function>
    MOE_A2A_DEVICE float result(Function f, uint32_t from, int c) const {
      const float sum = load_float(from) + bias[0][c];
      if constexpr (kGated) {
        return gated(activation, f, sum, load_float(from + 32 * 4) + bias[1][c]);
      } else {
        return f(sum);
      }
    }
  };
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET

#endif
