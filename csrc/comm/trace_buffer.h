// What each warp did, and when: records that kernels write to memory for the host to read afterwards.
//
// Each warp of each block has its own segment, so nothing is shared beyond the block. A full segment drops records but
// still counts attempts, so the number dropped is exact. Launches of one object run one after another; each appends
// where the previous one stopped. GPU kernels compiled with the recorder always record: checking whether the trace is
// on was a third of the recorder's instructions. With the trace off, the host launches the kernels without it. CPU
// kernels are compiled once, and check.
#pragma once

#include <cstdint>

#include "arch/arch.h"
#include "comm/vocabulary.h"

namespace moe_a2a {

struct TraceEvent {
  TraceKind kind;
  uint64_t begin;  // by trace_now()
  int peer = -1;
  int token = -1;
  uint32_t polls = 0;  // of a wait; for kSendLl a mask of ranks, see record_send_ll()
};

// Little-endian, 16 bytes:
//   word 0   bits 47..0    begin, the low bits of the target's clock
//            bits 63..48   polls; 65535: that many or more
//   word 1   bits 31..0    duration in ticks; 2^32 - 1: that long or longer
//            bits 36..32   kind
//            bits 42..37   peer, where there is one
//            bits 62..43   token; 2^20 - 1: none
//            bit  63       there is a peer
struct alignas(16) TraceRecord {
  static constexpr int kTimeBits = 48, kPollBits = 64 - kTimeBits, kKindAt = 32, kPeerAt = 37, kTokenAt = 43,
                       kHasPeerAt = 63;
  static constexpr uint64_t kMaxPolls = (1u << kPollBits) - 1, kMaxDuration = 0xffffffff, kNoToken = 0xfffff;

  uint64_t word[2];

  MOE_A2A_HOST_DEVICE static TraceRecord pack(const TraceEvent& event, uint64_t duration) {
    const uint64_t polls = event.polls < kMaxPolls ? event.polls : kMaxPolls;
    const uint64_t peer = event.peer < 0 ? 0 : uint64_t{1} << kHasPeerAt | static_cast<uint64_t>(event.peer) << kPeerAt;
    return {{(event.begin & ((uint64_t{1} << kTimeBits) - 1)) | polls << kTimeBits,
             (duration < kMaxDuration ? duration : kMaxDuration) | static_cast<uint64_t>(event.kind) << kKindAt | peer |
                 (static_cast<uint64_t>(event.token) & kNoToken) << kTokenAt}};
  }
};

// As a kernel sees it. Segment s belongs to warp s % num_warps of block s / num_warps.
struct TraceBuffer {
  uint64_t* attempts = nullptr;    // [segments]  attempted appends, over all launches
  TraceRecord* records = nullptr;  // [segments, capacity]; null: the trace is off
  uint32_t capacity = 0;

  MOE_A2A_HOST_DEVICE bool is_on() const { return records != nullptr; }
  // Records in a segment after `num_attempts` attempts.
  MOE_A2A_HOST_DEVICE uint32_t written(uint64_t num_attempts) const {
    return num_attempts < capacity ? static_cast<uint32_t>(num_attempts) : capacity;
  }
};

}  // namespace moe_a2a

namespace moe_a2a::inline MOE_A2A_TARGET {

// A warp's place in its segment during a launch. Only records go to memory before the launch ends.
struct TraceCursor {
  TraceRecord* segment;  // null: the trace is off
  uint64_t attempts;     // of earlier launches
  uint64_t opened_at;
  uint32_t number;  // of the segment
  uint32_t count;
};

inline constexpr bool kRecording = MOE_A2A_RECORDING;  // compiled with the recorder

// Whether such a launch records.
MOE_A2A_DEVICE bool trace_is_on() {
#if MOE_A2A_RECORDS_ALWAYS
  return true;
#else
  return warp_memory<TraceCursor>().segment != nullptr;
#endif
}

// When a slice begins; 0 in launches that do not record.
MOE_A2A_DEVICE uint64_t trace_now() { return kRecording && trace_is_on() ? clock_now() : 0; }

// Callable by any thread: the threads of a warp share its cursor.
MOE_A2A_DEVICE void append(const TraceBuffer& trace, const TraceEvent& event, uint64_t end) {
  TraceCursor& cursor = warp_memory<TraceCursor>();
  TraceRecord* segment = cursor.segment;  // before the atomic, so that both latencies overlap
  const uint32_t place = atomic_add<Order::kRelaxed, Scope::kBlock>(&cursor.count, 1u);
  if (place < trace.capacity) store_values(segment[place].word, TraceRecord::pack(event, end - event.begin).word);
}

// A slice of the whole group's work, from event.begin until now.
template <class Group>
MOE_A2A_DEVICE void record(const TraceBuffer& trace, const Group& group, const TraceEvent& event) {
  if (kRecording && trace_is_on() && group.rank() == 0) append(trace, event, clock_now());
}

// Every warp continues its segment where the previous launch stopped.
MOE_A2A_DEVICE TraceCursor cursor_at(const TraceBuffer& trace, uint32_t segment) {
  if (!MOE_A2A_RECORDS_ALWAYS && !trace.is_on()) return {};
  const uint64_t attempts = trace.attempts[segment];
  return {.segment = trace.records + uint64_t{segment} * trace.capacity,
          .attempts = attempts,
          .opened_at = clock_now(),
          .number = segment,
          .count = trace.written(attempts)};
}

// Around a launch.
MOE_A2A_DEVICE void open_segment(const TraceBuffer& trace, const Grid& grid, const Block& block) {
  if (!kRecording) return;
  const Warp warp = block.warp();
  if (warp.rank() == 0) {
    const int segment = grid.rank() * block.num_warps() + block.warp_rank();
    warp_memory<TraceCursor>() = cursor_at(trace, static_cast<uint32_t>(segment));
  }
  warp.sync();
}

MOE_A2A_DEVICE void close_segment(const TraceBuffer& trace, const Block& block, int operation) {
  if (!kRecording || !trace_is_on()) return;
  const Warp warp = block.warp();
  warp.sync();  // all threads of the warp have recorded
  if (warp.rank() != 0) return;
  TraceCursor& cursor = warp_memory<TraceCursor>();
  record(trace, warp, {.kind = TraceKind::kKernel, .begin = cursor.opened_at, .token = operation});
  // Not reloaded: the load would be the last thing that the launch waits for.
  trace.attempts[cursor.number] = cursor.attempts + cursor.count - trace.written(cursor.attempts);
  if (!MOE_A2A_RECORDS_ALWAYS) cursor.segment = nullptr;  // off for a warp that keeps no record
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
