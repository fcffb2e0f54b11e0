// The grouped GEMM as a pipeline of warps, for targets with the primitives of arch/cuda_tile_pipeline.h.
//
// A cluster of two blocks takes a unit of work: two tiles of 128 rows that share a tile of weights, half of which each
// block loads for both. In a block, two warps gather rows of x through the list, one loads weights and scales, one
// hands the gathered rows to the products, and two warp groups multiply, apply the activation and store. Without a list
// one warp loads rows. Stages in shared memory connect them. With a Sender the results also leave: see
// pipelined_combine_send.h.
#pragma once

#include "moe/experts/multiplying_warp.h"

#if defined(MOE_A2A_HAS_TILE_PIPELINE)

namespace moe_a2a::inline MOE_A2A_TARGET {

// The sender of a product that sends nothing.
struct NoSender {
  struct Args {};
  static constexpr bool kSends = false;
};

template <class T, bool kGated, bool kGathers, class Sender = NoSender>
struct PipelinedGemm {
  using Memory = PipelineMemory;
  static constexpr bool kIsFloat8 = std::is_same_v<T, Float8>;
  static constexpr int kTileDepth = Memory::kRowBytes / sizeof(T), kPieceElements = 16 / sizeof(T);
  // Gate and up of the same columns are side by side, so each thread has both, whatever the order of the weights.
  static constexpr int kOutColumns = kGated ? Memory::kHalfColumns : Memory::kTileColumns;
  using Tiles = ExpertTiles<PairedTiles, Memory::kTileRows, kOutColumns>;
  using Units = UnitReader<Sender::kSends>;
  using Multiplying = MultiplyingWarp<T, kGated, Sender::kSends, Tiles>;

  struct Args {
    GroupedGemmArgs gemm;
    TensorMap w;  // [num_experts, 1 or 2 (gate, up), num_columns, depth], boxes of half a tile's columns
    // [num_x_rows, depth], boxes of a tile's rows, and of few rows. Unused when rows are gathered
    TensorMap x, few_x;
    typename Sender::Args sender;
  };
  static constexpr bool kSends = Sender::kSends;
  static_assert(!(kSends && kGathers), "sums are of the second product");
  static constexpr const char* kName = "pipelined_gemm";
  static constexpr int kThreads = 384, kBlocks = PairedTiles::kBlocks, kSharedBytes = Memory::kBytes;
  static constexpr int kLoadWarps = 4, kGatherWarps = 2, kRowsWarp = 0, kWeightsWarp = 2, kPassWarp = 3;
  static constexpr int kGatherThreads = kGatherWarps * kWarpSize;
  // Registers per thread at the launch; then the loading warps give some to the multiplying ones.
  static constexpr int kRegisters = 168;
  static constexpr int kLoadRegisters = !kIsFloat8 ? 88 : kGathers ? 72 : 56;
  static constexpr int kMultiplyRegisters = !kIsFloat8 ? 208 : kGathers ? 216 : 224;
  static_assert(128 * kLoadRegisters + 256 * kMultiplyRegisters <= kThreads * kRegisters);

  MOE_A2A_DEVICE static void run(const Args& args, std::byte* shared) {
    if constexpr (kSends) {
      if (Sender::only_sends(args.sender)) {
        wait_for_last_launch();
      } else {
        multiply_units(args, shared);
        end_pipeline(Memory{shared_address(shared)});
      }
      Sender::template send<kThreads>(args.sender, {args.gemm.stored_tiles, tiles_of_a_row(args.gemm)}, shared);
    } else {
      multiply_units(args, shared);
    }
  }

  // Gives every thread kRegisters again, and frees the pipeline's shared memory.
  MOE_A2A_DEVICE static void end_pipeline(const Memory& memory) {
    if (thread_in_block() / kWarpSize < kLoadWarps) {
      take_registers<kRegisters>();
    } else {
      give_registers<kRegisters>();
    }
    fence_before_async_reads();
    block_sync();
    if (thread_in_block() < Memory::kNumBarriers) barrier_end(memory.barrier(thread_in_block()));
    block_sync();
  }

  MOE_A2A_DEVICE static void multiply_units(const Args& args, std::byte* shared) {
    const Memory memory{shared_address(shared)};
    const int warp = thread_in_block() / kWarpSize, block = block_in_cluster();
    if (thread_in_block() == 0) {
      let_next_launch_begin();
      init_barriers(memory);
    }
    block_sync();
    cluster_sync();
    if (warp < kLoadWarps) {
      give_registers<kLoadRegisters>();
      if (kGathers && warp < kGatherWarps) gather_rows(args.gemm, memory, block);
      if (!kGathers && warp == kRowsWarp) load_rows(args, memory, block);
      if (warp == kWeightsWarp) load_weights(args, memory, block);
      if (kGathers && warp == kPassWarp) pass_on(args.gemm, memory, block);
      if (kSends && warp == kPassWarp) publish_tiles(args.gemm, memory, block);
    } else {
      take_registers<kMultiplyRegisters>();
      // Broadcast, so that the compiler knows it to be the same in all lanes and describes the products' operands in
      // uniform registers. Otherwise each product waits for eight moves into these (H100, float8, 512 and 1024 rows per
      // expert: the first product took 10 to 13 % longer).
      const int index = Warp{}.broadcast(warp) - kLoadWarps;
      Multiplying(args.gemm, memory, index, block, num_steps(args.gemm)).run();
    }
    warp_sync();
    cluster_sync();  // the other block may still arrive at this one's barriers
  }

  MOE_A2A_DEVICE static void init_barriers(const Memory& memory) {
    for (int s = 0; s < Memory::kStages; ++s) {
      barrier_init(memory.full(s), 2 + (kIsFloat8 ? kWarpSize : 0));
      barrier_init(memory.empty(s), Memory::kMultiplyWarps * kBlocks);
      barrier_init(memory.landed(s), kGatherThreads);
    }
    constexpr int kReaders = Memory::kMultiplyWarps + 1 + (kGathers ? kGatherWarps + 1 : kSends ? 2 : 1);
    for (int place = 0; place < 2; ++place) {
      barrier_init(memory.stored(place), Memory::kMultiplyWarps);
      barrier_init(memory.published(place), 1);
      barrier_init(memory.unit_full(place), 1);
      barrier_init(memory.unit_empty(place), kReaders * kBlocks);
    }
    fence_barrier_init();
  }

  MOE_A2A_DEVICE static int num_steps(const GroupedGemmArgs& args) { return div_up(args.depth, kTileDepth); }
  MOE_A2A_DEVICE static uint32_t tiles_of_a_row(const GroupedGemmArgs& args) {
    return static_cast<uint32_t>(div_up(args.num_columns, kOutColumns));
  }

  // ---- rows of x, by 16-byte copies straight into the swizzled tile. Eight threads per row.

  static constexpr int kRowStep = kGatherThreads / 8, kCopies = Memory::kTileRows / kRowStep;

  MOE_A2A_DEVICE static void gather_rows(const GroupedGemmArgs& args, const Memory& memory, int block) {
    const int piece = thread_in_block() % 8, first_row = thread_in_block() % kGatherThreads / 8;
    const uint32_t place = first_row * Memory::kRowBytes + ((piece ^ (first_row % 8)) << 4);
    StageRing ring;
    Units units(memory);
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
                                                  piece * kPieceElements);
      }
      const bool all_rows = !Warp{}.any(is_row != (1u << kCopies) - 1);
      // All rows that are multiplied are written: missing ones as zeros, which cost the least power.
      const int num_copies = Multiplying::padded_rows(tiles.num_positions) / kRowStep;
      for (int step = 0; step < num_steps(args); ++step) {
        const uint32_t to = memory.rows(ring.stage) + place;
        const int depth = args.depth - step * kTileDepth;
        barrier_wait(memory.empty(ring.stage), ring.parity ^ 1);
        if (all_rows && depth >= kTileDepth) {
          MOE_A2A_UNROLL
          for (int i = 0; i < kCopies; ++i) copy_vector(to + i * kRowStep * Memory::kRowBytes, source[i]);
        } else {
          MOE_A2A_UNROLL
          for (int i = 0; i < kCopies; ++i) {
            if (i >= num_copies) continue;
            const bool is_there = piece * kPieceElements < depth && (is_row >> i & 1) != 0;
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
    Units units(memory);
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

  // ---- weights, and rows of x that are contiguous, by TMA; scales

  // Rows may be results of the launch before, weights are not: they are in flight while that launch ends.
  MOE_A2A_DEVICE static void load_rows(const Args& args, const Memory& memory, int block) {
    StageRing ring;
    Units units(memory);
    Tiles tiles(args.gemm, Warp{});
    wait_for_last_launch();
    while (tiles.seek(units.next(Warp{}), block)) {
      RowScales scales(args.gemm, tiles);
      const bool are_few = tiles.num_positions <= Memory::kFewRows;
      const TensorMap* x = are_few ? &args.few_x : &args.x;
      const int num_bytes = (are_few ? Memory::kFewRows : Memory::kTileRows) * Memory::kRowBytes;
      for (int step = 0; step < num_steps(args.gemm); ++step) {
        barrier_wait(memory.empty(ring.stage), ring.parity ^ 1);
        if (Warp{}.rank() == 0) {
          barrier_expect(memory.full(ring.stage), num_bytes);
          load_tile(memory.rows(ring.stage), x, memory.full(ring.stage), step * kTileDepth, tiles.first_position);
        }
        warp_sync();
        scales.load(memory, ring.stage);
        ring.advance();
      }
    }
  }

  MOE_A2A_DEVICE static void load_weights(const Args& args, const Memory& memory, int block) {
    StageRing ring;
    Units units(memory);
    UnitTaker<kSends> taker(memory, args.gemm.next_unit, block);
    if (kSends && Warp{}.rank() == 0) taker.take();
    Tiles tiles(args.gemm, Warp{});
    while (tiles.seek(units.next(Warp{}), block)) {
      std::conditional_t<kGathers, RowScales, NoScales> scales(args.gemm, tiles);  // else load_rows() loads them
      for (int step = 0; step < num_steps(args.gemm); ++step) {
        barrier_wait(memory.empty(ring.stage), ring.parity ^ 1);
        if (Warp{}.rank() == 0) {
          load_columns(args, memory, block, tiles, ring.stage, step * kTileDepth);
          if (step == 0) taker.take();
        }
        warp_sync();
        scales.load(memory, ring.stage);
        ring.advance();
      }
    }
  }

  struct NoScales {
    MOE_A2A_DEVICE NoScales(const GroupedGemmArgs&, const Tiles&) {}
    MOE_A2A_DEVICE void load(const Memory&, int) const {}
  };

  // Copies a tile's scales, stage by stage. Each lane copies those of four rows; two lanes also copy the one of a half
  // of the columns each.
  class ScaleLoader {
   public:
    MOE_A2A_DEVICE ScaleLoader(const GroupedGemmArgs& args, const Tiles& tiles) : lane_(Warp{}.rank()) {
      MOE_A2A_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const int at = lane_ + kWarpSize * i;
        const int row = at < tiles.num_positions ? row_of_position(args, tiles.first_position + at) : -1;
        if (row >= 0) is_row_ |= 1u << i;
        of_row_[i] = args.x_scales + (row < 0 ? 0 : row) * args.x_scales_stride;
      }
      // The second half may lie past the last column; then its products are zeros, with any finite scale.
      const int half = lane_ % 2, column = tiles.column_tile * kOutColumns + (kGated ? 0 : half * Memory::kHalfColumns);
      of_columns_ = args.scales_of_w(tiles.expert, kGated ? half : 0, column);
      is_column_ = column < args.num_columns;
    }

    // The products of a missing row are zeros, which a scale of another row must not turn into NaN: its scale is zero.
    MOE_A2A_DEVICE void load(const Memory& memory, int stage) {
      MOE_A2A_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const uint32_t to = memory.row_scales(stage) + (lane_ + kWarpSize * i) * 4;
        copy_float_or_zero(to, of_row_[i]++, (is_row_ >> i & 1) != 0);
      }
      if (lane_ < 2) copy_float_or_zero(memory.column_scales(stage) + lane_ * 4, of_columns_++, is_column_);
      barrier_arrive_after_copies(memory.full(stage));
    }

   private:
    static constexpr int kRows = Memory::kTileRows / kWarpSize;

    const float *of_row_[kRows], *of_columns_;
    uint32_t is_row_ = 0;
    int lane_;
    bool is_column_;
  };

  using RowScales = std::conditional_t<kIsFloat8, ScaleLoader, NoScales>;

  MOE_A2A_DEVICE static void load_columns(const Args& args, const Memory& memory, int block, const Tiles& tiles,
                                          int stage, int depth) {
    const uint32_t full = memory.full(stage), columns = memory.columns(stage);
    const auto column = [&](int half) {
      return tiles.column_tile * kOutColumns + (kGated ? 0 : half * Memory::kHalfColumns);
    };
    barrier_expect(full, Memory::kColumnsBytes);
    if (tiles.shares_columns) {
      load_tile_for_both(columns + block * Memory::kHalfBytes, &args.w, full, depth, column(block), kGated ? block : 0,
                         tiles.expert);
    } else {
      for (int half = 0; half < 2; ++half) {
        load_tile(columns + half * Memory::kHalfBytes, &args.w, full, depth, column(half), kGated ? half : 0,
                  tiles.expert);
      }
    }
  }

  // ---- stored tiles, for readers in this launch

  // Publishing takes a fence at GPU scope. It has its own warp: in the multiplying warps the fence would wait for their
  // stores, and for their arrivals at the other block.
  MOE_A2A_DEVICE static void publish_tiles(const GroupedGemmArgs& args, const Memory& memory, int block) {
    Turn turn;
    Units units(memory);
    Tiles tiles(args, Warp{});
    while (tiles.seek(units.next(Warp{}), block)) {
      barrier_wait(memory.stored(turn.place()), turn.parity());
      const bool is_column = tiles.column_tile * kOutColumns < args.num_columns;  // see PairedTiles
      if (is_column) StoredTiles::add(args.stored_tiles, Warp{}, tiles.first_position, tiles.num_positions);
      warp_sync();
      if (Warp{}.rank() == 0) barrier_arrive(memory.published(turn.place()));
      ++turn.number;
    }
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET

#endif
