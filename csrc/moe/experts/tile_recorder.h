// The trace of a block of the pipelined GEMM, recorded by the first of its multiplying threads. The cursor lives in
// registers: the stages leave no shared memory for it.
#pragma once

#include "moe/experts/grouped_gemm.h"

#if defined(MOE_A2A_HAS_TILE_PIPELINE)

namespace moe_a2a::inline MOE_A2A_TARGET {

#if MOE_A2A_RECORDING

class TileRecorder {
 public:
  // warp: among those that multiply.
  MOE_A2A_DEVICE TileRecorder(const TraceBuffer& trace, int warp) : records_(warp == 0 && Warp{}.rank() == 0) {
    if (!records_) return;
    place_ = trace.written(trace.attempts[segment()]);
    opened_at_ = last_at_ = clock_now();
  }

  // A tile begins where the previous one ends: the loads of its first stages overlap the previous tile's products.
  template <class Place>
  MOE_A2A_DEVICE void tile(const GroupedGemmArgs& args, const Place& place) {
    if (!records_) return;
    const uint64_t begin = last_at_;
    last_at_ = clock_now();
    if (place.first_column < args.num_columns) {  // see PairedTiles
      put(args.trace, tile_event(place.expert, place.num_rows, begin), last_at_);
    }
  }

  MOE_A2A_DEVICE void close(const TraceBuffer& trace) {
    if (!records_) return;
    const TraceEvent launch = {
        .kind = TraceKind::kKernel, .begin = opened_at_, .token = static_cast<int>(moe_op::kGroupedGemm)};
    put(trace, launch, clock_now());
    const uint64_t before = trace.attempts[segment()];
    trace.attempts[segment()] = before + place_ - trace.written(before);
  }

 private:
  // The segment of the block's first warp, as Tracer numbers them.
  MOE_A2A_DEVICE static int segment() { return block_in_grid() * kBlockWarps; }

  MOE_A2A_DEVICE void put(const TraceBuffer& trace, const TraceEvent& event, uint64_t end) {
    const uint32_t place = place_++;
    if (place >= trace.capacity) return;
    TraceRecord* segment = trace.records + TileRecorder::segment() * uint64_t{trace.capacity};
    store_values(segment[place].word, TraceRecord::pack(event, end - event.begin).word);
  }

  bool records_;
  uint32_t place_ = 0;  // of the next record in the segment
  uint64_t opened_at_ = 0, last_at_ = 0;
};

#else

struct TileRecorder {
  MOE_A2A_DEVICE TileRecorder(const TraceBuffer&, int) {}
  template <class Place>
  MOE_A2A_DEVICE void tile(const GroupedGemmArgs&, const Place&) {}
  MOE_A2A_DEVICE void close(const TraceBuffer&) {}
};

#endif

}  // namespace moe_a2a::inline MOE_A2A_TARGET

#endif
