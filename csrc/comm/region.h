// How a client lays out its memory: a struct names every field, and its take_from() takes them from a RegionLayout,
// which places them one after another.
//
// The symmetric part has the same offsets on every rank, so HeapView::peer() finds a field anywhere. The local part is
// private to the rank. Equal configurations give equal offsets; ranks compare the digest of the symmetric part when
// they meet.
#pragma once

#include <cstddef>
#include <cstdint>

#include "comm/array.h"
#include "comm/fnv1a.h"
#include "comm/report.h"
#include "comm/signal.h"

namespace moe_a2a {

struct RegionSize {
  size_t symmetric_bytes = 0;
  size_t local_bytes = 0;
  uint64_t layout_digest = 0;  // of the sequence of symmetric fields: equal offsets, equal digests
};

// Hands out arrays, each on its own 128-byte line. With a null base only the sizes are valid.
class RegionLayout {
 public:
  explicit RegionLayout(std::byte* base) : base_(base) {}

  template <class T, class... Extent>
  Array<T, sizeof...(Extent)> take(Extent... extent) {
    constexpr int kRank = sizeof...(Extent);
    const int64_t extents[] = {static_cast<int64_t>(extent)...};
    Array<T, kRank> array;
    int64_t count = 1;
    for (int i = kRank - 1; i >= 0; --i) {
      if (i < kRank - 1) array.stride[i] = count;
      count *= extents[i];
    }
    offset_ = (offset_ + 127) / 128 * 128;
    array.data = reinterpret_cast<T*>(base_ + offset_);
    const size_t nbytes = static_cast<size_t>(count) * sizeof(T);
    fields_.add(offset_ ^ nbytes);
    offset_ += nbytes;
    return array;
  }

  size_t size() const { return (offset_ + 4095) / 4096 * 4096; }
  uint64_t digest() const { return fields_.digest; }

 private:
  std::byte* base_;
  size_t offset_ = 0;
  Fnv1a fields_;  // their sequence
};

// What every client's region begins with: fields for leaving, refusing and reporting.
struct ClientServices {
  // ---- symmetric
  Array<Signal, 1> goodbye;           // [R src]  epoch 1: src makes no more calls
  Array<uint64_t, 3> refusal_text;    // [slots, R src, kRefusalWords]  why src refused its call on this slot
  Array<uint64_t, 1> handles_digest;  // [R src]  of the handles that src has mapped, if the caller carried them
  // ---- local
  Array<uint32_t, 1> num_reports;  // [Reports::kNum]  claimed so far, by kind: whoever increments it writes the report

  static ClientServices take_from(RegionLayout& symmetric, RegionLayout& local, int num_ranks, int num_slots) {
    return {.goodbye = symmetric.take<Signal>(num_ranks),
            .refusal_text = symmetric.take<uint64_t>(num_slots, num_ranks, kRefusalWords),
            .handles_digest = symmetric.take<uint64_t>(num_ranks),
            .num_reports = local.take<uint32_t>(Reports::kNum)};
  }
};

}  // namespace moe_a2a
