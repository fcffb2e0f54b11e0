// The memory of the collectives, and what their kernels get besides their own arguments.
#pragma once

#include "collectives/announcement.h"
#include "collectives/call_state.h"
#include "comm/context.h"

namespace moe_a2a {

// A chunk is the unit behind one signal: at least as many bytes as a block of a GPU copies at once. Large calls are cut
// into several per block, so that one is sent while another is used, but each costs a fence. Microseconds with chunks
// of 32, 64 and 128 KiB: two-shot, 2 H200, 32 MiB: 125, 116, 124; 4 H100, 128 MiB: 677, 657, 657. The halves of
// two-shot, 4 H100, 64 MiB: reduce-scatter 166, 188, 183, all-gather 166, 186, 192.
inline constexpr int kMinChunkBytes = 8 << 10, kLargeChunkBytes = 64 << 10, kLargeChunkBytesOfHalves = 32 << 10;
// Slightly fewer than an H200's multiprocessors (132), so that one is left for the announcement.
inline constexpr int kChunksPerRound = 128, kMaxRounds = 4, kMaxChunks = kMaxRounds * kChunksPerRound;
// Even shares begin at multiples of this many elements, and so do chunks within their share: whole vectors, whole
// blocks of line codecs.
inline constexpr int kShareUnit = 64;

// Room for an announcement in LL words of any target: 16 bytes for 12, or 8 for 4.
inline constexpr int kAnnouncementBytes = 32;

// Sizes of the region's fields.
struct CollectiveBytes {
  int64_t share = 0;    // see share_bytes_for()
  int64_t words = 0;    // of a vector in LL words
  int64_t tensors = 0;  // the caller's, in symmetric memory
};

// R = num_ranks. Epoch e uses half e % 2: by the time a rank begins e, it has observed every rank's call_signal or
// announcement of e - 1, which each of them wrote after its launch of e - 2 had ended. So a half never serves
// two epochs at once, whatever the sizes, types and algorithms of the calls. Fields that are not atomic words need the
// signal, see Seen.
struct CollectiveRegion {
  // ---- symmetric: written by the rank named in the index "src", read by the owner of the memory
  Array<Signal, 2> call_signal;      // [2, R src]  src makes this call
  Array<std::byte, 3> announcement;  // [2, R src, kAnnouncementBytes]  LL words: which one
  Array<Signal, 3> chunk_signal;     // [2, R src, chunks]  a chunk of src has landed here
  Array<Signal, 3> result_signal;    // [2, R src, chunks]  a chunk of src's share is complete: in its `result`, with a
                                     // codec in `landing`, in a direct call in this rank's out
  Array<std::byte, 3> landing;       // [2, R src, share_bytes]  with a codec, the second half is for src's results
  Array<std::byte, 3> words;         // [2, R src, 2 * words_bytes]  LL words: src's vector
  // ---- symmetric: written by its owner, read by all ranks
  Array<std::byte, 2> result;  // [2, share_bytes]  the share that this rank has reduced
  // ---- symmetric: the caller's tensors, which direct calls read and write on all ranks
  Array<std::byte, 1> tensors;  // [tensor_bytes]

  // ---- local
  Array<CallState, 1> state;      // [1]
  Array<uint64_t, 3> other_call;  // [2, R, kRefusalWords]  a rank's announcement and this one's, laid out like a text

  static CollectiveRegion take_from(RegionLayout& symmetric, RegionLayout& local, int num_ranks,
                                    const CollectiveBytes& bytes) {
    return {.call_signal = symmetric.take<Signal>(2, num_ranks),
            .announcement = symmetric.take<std::byte>(2, num_ranks, kAnnouncementBytes),
            .chunk_signal = symmetric.take<Signal>(2, num_ranks, kMaxChunks),
            .result_signal = symmetric.take<Signal>(2, num_ranks, kMaxChunks),
            .landing = symmetric.take<std::byte>(2, num_ranks, bytes.share),
            .words = symmetric.take<std::byte>(2, num_ranks, 2 * bytes.words),
            .result = symmetric.take<std::byte>(2, bytes.share),
            .tensors = symmetric.take<std::byte>(bytes.tensors),
            .state = local.take<CallState>(1),
            .other_call = local.take<uint64_t>(2, num_ranks, kRefusalWords)};
  }
};

struct CollectiveContext : ClientContext {
  CollectiveRegion region;
};

// Bytes of each rank's share of a workspace of `max_nbytes`.
constexpr int64_t share_bytes_for(int64_t max_nbytes, int num_ranks) {
  constexpr int64_t kUnit = kShareUnit * 4;
  return (max_nbytes + num_ranks * kUnit - 1) / (num_ranks * kUnit) * kUnit;
}

// Lays out the region from the two bases and points the context at it; with null bases only the size is valid.
inline RegionSize place_region(CollectiveContext& context, int num_ranks, const CollectiveBytes& bytes,
                               std::byte* symmetric_base, std::byte* local_base) {
  return place_client(context, num_ranks, 2, symmetric_base, local_base, [&](auto& symmetric, auto& local) {
    context.region = CollectiveRegion::take_from(symmetric, local, num_ranks, bytes);
  });
}

}  // namespace moe_a2a
