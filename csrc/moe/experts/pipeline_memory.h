// The shared memory of a block of the pipelined GEMM, by name, and the queue of units that clusters draw from.
#pragma once

#include "arch/arch.h"
#include "moe/experts/expert_tiles.h"

#if defined(MOE_A2A_HAS_TILE_PIPELINE)

namespace moe_a2a::inline MOE_A2A_TARGET {

// A row of the results' staging area. Its 16-byte pieces are permuted by the row, so that eight rows of a column cover
// all banks.
struct StagedRow {
  uint32_t address, twist;
  MOE_A2A_DEVICE uint32_t at(uint32_t byte) const { return address + (byte ^ twist); }
};

// Stages of one row tile and one column tile each, then a staging area per multiplying warp for its results, then the
// scales of each stage (float8), then barriers.
struct PipelineMemory {
  static constexpr int kStages = 4;
  static constexpr int kTileRows = 128, kTileColumns = 256, kHalfColumns = kTileColumns / 2;
  static constexpr int kMultiplyWarps = 8;
  static constexpr int kFewRows = 32;    // up to here a tile's rows are few
  static constexpr int kRowBytes = 128;  // of a stage: 64 values of 16 bits, or 128 of 8
  static constexpr int kRowsBytes = kTileRows * kRowBytes, kColumnsBytes = kTileColumns * kRowBytes;
  static constexpr int kStageBytes = kRowsBytes + kColumnsBytes;
  static constexpr int kWarpRows = 16, kHalfBytes = kColumnsBytes / 2, kResultRowBytes = kHalfColumns * 2;
  static constexpr int kScalesBytes = (kTileRows + 2) * 4;  // of the rows, then of both halves of the columns
  static constexpr int kResultsAt = kStages * kStageBytes;
  static constexpr int kScalesAt = kResultsAt + kMultiplyWarps * kWarpRows * kResultRowBytes;
  static constexpr int kBarriersAt = kScalesAt + kStages * kScalesBytes;
  static constexpr int kNumBarriers = 3 * kStages + 4 + 4;
  static constexpr int kUnitsAt = kBarriersAt + kNumBarriers * 8;
  static constexpr int kBytes = kUnitsAt + 2 * 8;

  uint32_t base;

  MOE_A2A_DEVICE uint32_t rows(int stage) const { return base + stage * kStageBytes; }
  MOE_A2A_DEVICE uint32_t columns(int stage) const { return rows(stage) + kRowsBytes; }
  MOE_A2A_DEVICE uint32_t results(int warp) const { return base + kResultsAt + warp * kWarpRows * kResultRowBytes; }
  MOE_A2A_DEVICE static StagedRow staged_row(uint32_t results, int row) {
    return {results + row * kResultRowBytes, static_cast<uint32_t>(row % 8 << 4)};
  }
  MOE_A2A_DEVICE uint32_t row_scales(int stage) const { return base + kScalesAt + stage * kScalesBytes; }
  MOE_A2A_DEVICE uint32_t column_scales(int stage) const { return row_scales(stage) + kTileRows * 4; }
  MOE_A2A_DEVICE uint32_t barrier(int i) const { return base + kBarriersAt + 8 * i; }
  // Barriers of a stage: both tiles are loaded; all readers are done; the gathered rows have landed.
  MOE_A2A_DEVICE uint32_t full(int stage) const { return barrier(stage); }
  MOE_A2A_DEVICE uint32_t empty(int stage) const { return barrier(kStages + stage); }
  MOE_A2A_DEVICE uint32_t landed(int stage) const { return barrier(2 * kStages + stage); }
  // Two places for the next unit: its number, and barriers: it is written; all have read it.
  MOE_A2A_DEVICE uint32_t unit(int place) const { return base + kUnitsAt + 8 * place; }
  MOE_A2A_DEVICE uint32_t unit_full(int place) const { return barrier(3 * kStages + place); }
  MOE_A2A_DEVICE uint32_t unit_empty(int place) const { return barrier(3 * kStages + 2 + place); }
  // Two places for the newest tiles. Barriers: the tile is stored; it is published (publish_tiles()).
  MOE_A2A_DEVICE uint32_t stored(int place) const { return barrier(3 * kStages + 4 + place); }
  MOE_A2A_DEVICE uint32_t published(int place) const { return barrier(3 * kStages + 6 + place); }
};
static_assert(PipelineMemory::kStageBytes % 1024 == 0 && PipelineMemory::kBytes <= 227 * 1024);

// Alternates between two places in which one warp hands data to another; `parity` is that of their barriers.
struct Turn {
  uint32_t number = 0;

  MOE_A2A_DEVICE int place() const { return static_cast<int>(number & 1); }
  MOE_A2A_DEVICE uint32_t parity() const { return number >> 1 & 1; }
};

// Cycles through the stages; `parity` is that of their barriers.
struct StageRing {
  int stage = 0;
  uint32_t parity = 0;
  MOE_A2A_DEVICE void advance() {
    if (++stage == PipelineMemory::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// A cluster's first unit is its rank; after that, whichever cluster is free draws the next. Tiles differ in duration,
// so with a fixed order clusters drift apart, and tiles that share weights no longer meet in the last-level cache
// (H200, 512 rows per expert, random routing: 9.6 GB read instead of 6.8, 1.15 times as long).
//
// kDrawsAll: the first unit is drawn too. Needed if others wait for results in the same launch: then no unit may belong
// to a cluster that is not resident yet.
template <bool kDrawsAll>
class UnitReader {
 public:
  MOE_A2A_DEVICE explicit UnitReader(const PipelineMemory& memory)
      : memory_(memory), unit_(block_in_grid() / PairedTiles::kBlocks) {}

  // Every warp that walks the units calls it equally often.
  MOE_A2A_DEVICE int next(const Warp& warp) {
    if (!is_first_) {
      const int place = turn_ & 1;
      barrier_wait(memory_.unit_full(place), turn_ >> 1 & 1);
      unit_ = load_word(memory_.unit(place));
      warp.sync();
      if (warp.rank() == 0) barrier_arrive_at(memory_.unit_empty(place), 0);
      ++turn_;
    }
    is_first_ = false;
    return unit_;
  }

 private:
  PipelineMemory memory_;
  int unit_;
  uint32_t turn_ = 0;
  bool is_first_ = !kDrawsAll;
};

// Used by one thread of each block to draw the unit after the current one. Block 0 of the cluster draws for both.
template <bool kDrawsAll>
class UnitTaker {
 public:
  MOE_A2A_DEVICE UnitTaker(const PipelineMemory& memory, int32_t* next_unit, int block)
      : memory_(memory), next_unit_(next_unit), block_(block) {}

  MOE_A2A_DEVICE void take() {
    const int place = turn_ & 1;
    barrier_expect(memory_.unit_full(place), 4);
    if (block_ == 0) {
      barrier_wait(memory_.unit_empty(place), (turn_ >> 1 & 1) ^ 1);
      const int num_first = kDrawsAll ? 0 : blocks_in_grid() / PairedTiles::kBlocks;
      const int unit = num_first + atomic_add<Order::kRelaxed, Scope::kDevice>(next_unit_, 1);
      for (int b = 0; b < PairedTiles::kBlocks; ++b) {
        store_word_at(memory_.unit(place), memory_.unit_full(place), b, unit);
      }
    }
    ++turn_;
  }

 private:
  PipelineMemory memory_;
  int32_t* next_unit_;
  int block_;
  uint32_t turn_ = 0;
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET

#endif
