// Trace records decoded bit by bit, as comm/trace_buffer.h describes them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "comm/tracer.h"

namespace moe_a2a {

struct TraceFields {
  uint64_t begin, polls, duration;
  TraceKind kind;
  uint64_t peer, token, has_peer;
  explicit TraceFields(const TraceRecord& r)
      : begin(r.word[0] & 0xffffffffffff),
        polls(r.word[0] >> 48),
        duration(r.word[1] & 0xffffffff),
        kind(static_cast<TraceKind>(r.word[1] >> 32 & 0x1f)),
        peer(r.word[1] >> 37 & 0x3f),
        token(r.word[1] >> 43 & 0xfffff),
        has_peer(r.word[1] >> 63) {}
};

inline int64_t count(const TraceDump& dump, TraceKind kind) {
  return std::count_if(dump.records.begin(), dump.records.end(),
                       [&](const TraceRecord& record) { return TraceFields(record).kind == kind; });
}

}  // namespace moe_a2a
