#include "comm/tracer.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace moe_a2a {

// One segment for every warp that a launch may have.
int64_t Tracer::num_segments() const { return int64_t{std::max(2, device_.max_blocks())} * device_.warps_per_block(); }

void Tracer::start(int64_t records_per_segment) {
  if (records_per_segment < 1 || records_per_segment > INT32_MAX) {
    throw std::invalid_argument("records_per_segment=" + std::to_string(records_per_segment) + " is not in [1, " +
                                std::to_string(INT32_MAX) + "]");
  }
  device_.synchronize();
  const size_t count_bytes = num_segments() * sizeof(uint64_t);
  if (records_per_segment > buffer_.capacity) {
    const size_t record_bytes = num_segments() * records_per_segment * sizeof(TraceRecord);
    buffer_ = {.attempts = reinterpret_cast<uint64_t*>(device_.allocate_local(count_bytes)),
               .records = reinterpret_cast<TraceRecord*>(device_.allocate_local(record_bytes)),
               .capacity = static_cast<uint32_t>(records_per_segment)};
  }
  records_per_segment_ = static_cast<uint32_t>(records_per_segment);
  device_.clear(buffer_.attempts, count_bytes);
  shown_ = buffer_;
}

TraceDump Tracer::read() const {
  TraceDump dump;
  if (buffer_.records == nullptr) return dump;
  device_.synchronize();
  std::vector<uint64_t> attempts(num_segments());
  device_.copy_to_host(attempts.data(), buffer_.attempts, attempts.size() * sizeof(uint64_t));
  size_t total = 0;
  for (const uint64_t count : attempts) {
    const auto written = static_cast<uint32_t>(std::min<uint64_t>(count, records_per_segment_));
    dump.segment_written.push_back(written);
    dump.segment_dropped.push_back(static_cast<int64_t>(count - written));
    total += written;
  }
  dump.records.resize(total);
  TraceRecord* target = dump.records.data();
  for (size_t segment = 0; segment < attempts.size(); ++segment) {
    const size_t written = dump.segment_written[segment];
    if (written == 0) continue;
    device_.copy_to_host(target, buffer_.records + segment * buffer_.capacity, written * sizeof(TraceRecord));
    target += written;
  }
  return dump;
}

}  // namespace moe_a2a
