// Pieces of rows as LL words. Word w of a piece holds dwords from w * kLlData on: first the values, padded to a whole
// dword, then the scales.
//
// Small batches are latency-bound by a serial instruction chain: the common case is straight-line code, cold code is
// called out of line.
#pragma once

#include <bit>

#include "comm/ll_word.h"
#include "rows/wire.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// Words in flight per thread.
inline constexpr int kLlUnroll = kBlockThreads > 1 ? 3 : 1;

MOE_A2A_HOST_DEVICE int num_value_dwords(const RowSource& row) {
  return static_cast<int>((static_cast<uint32_t>(row.num_value_bytes) + 3) / 4);  // of a piece: 32 bits suffice
}
MOE_A2A_HOST_DEVICE int num_ll_words(const RowSource& row) {
  return num_ll_words(num_value_dwords(row) + static_cast<int>(row.num_scale_bytes / 4));
}
// Words reserved for each piece of a row: as many as the first piece has, which is the longest.
MOE_A2A_DEVICE int ll_words_per_piece(const RowLayout& layout) { return num_ll_words(layout.part(layout.piece(0))); }
// Whether word w holds only whole dwords of values.
MOE_A2A_DEVICE bool is_all_values(const RowSource& row, int w) {
  return 4 * (w + 1) * kLlData <= static_cast<int>(row.num_value_bytes);
}

// ---- the values of a word

// Whether values that begin here are loaded and stored as dwords.
MOE_A2A_DEVICE bool is_in_dwords(const void* values) {
  return !kAlignedVectors || reinterpret_cast<uint64_t>(values) % 4 == 0;
}

template <class T>
inline constexpr int kInWord = kLlData * 4 / static_cast<int>(sizeof(T));

template <class T>
struct WordValues {
  T value[kInWord<T>];
};

template <class T>
MOE_A2A_DEVICE WordValues<T> values_of(const LlWord& word) {
  struct Data {
    uint32_t dword[kLlData];
  } data;
  for (int d = 0; d < kLlData; ++d) data.dword[d] = word.data[d];
  return std::bit_cast<WordValues<T>>(data);
}

// Rounds and stores a word's values, at most `count` of them. `vectors`: the target is a multiple of 4 bytes.
template <class T>
MOE_A2A_DEVICE void store_rounded(T* target, int count, bool vectors, const float (&values)[kInWord<T>]) {
  constexpr int kInDword = 4 / sizeof(T);
  if (vectors && count >= kInWord<T>) {
    for (int d = 0; d < kLlData; ++d) {
      T dword[kInDword];
      for (int i = 0; i < kInDword; ++i) dword[i] = from_float<T>(values[d * kInDword + i]);
      store_values(target + d * kInDword, dword);
    }
    return;
  }
  for (int i = 0; i < kInWord<T> && i < count; ++i) target[i] = from_float<T>(values[i]);
}

// ---- sending

// Loads a word's data: all of it or, if kIsBounded, the first `num_dwords`, and 0 for the rest.
template <bool kIsBounded>
MOE_A2A_DEVICE void load_data(LlWord& word, const uint32_t* dwords, int num_dwords = 0, bool in_shared = false) {
  for (int d = 0; d < kLlData; ++d) {
    uint32_t dword[1] = {0};
    if (!kIsBounded || d < num_dwords) load_values(dword, dwords + d, in_shared);
    word.data[d] = dword[0];
  }
}

// Any dword of a piece, its values read byte by byte; 0 past the end.
MOE_A2A_RARE uint32_t any_dword(RowSource row, int i) {
  const int num_values = num_value_dwords(row);
  uint32_t dword[1] = {0};
  if (i >= num_values) {
    if (i - num_values < row.num_scale_bytes / 4) {
      load_values(dword, reinterpret_cast<const uint32_t*>(row.scales) + (i - num_values), row.in_shared);
    }
    return dword[0];
  }
  for (int b = 0; b < 4 && 4 * i + b < row.num_value_bytes; ++b) {
    dword[0] |= static_cast<uint32_t>(row.values[4 * i + b]) << 8 * b;
  }
  return dword[0];
}

// A word that is not all values, of a piece whose values are whole dwords. Nearly every piece ends with such a word,
// and its warp waits for it.
MOE_A2A_DEVICE void load_end(LlWord& word, const RowSource& row, int w) {
  const int num_values = num_value_dwords(row), num_scales = static_cast<int>(row.num_scale_bytes / 4);
  const int begin = w * kLlData;
  load_data<true>(word, reinterpret_cast<const uint32_t*>(row.values) + begin, num_values - begin, row.in_shared);
  for (int d = 0; d < kLlData; ++d) {
    const int i = begin + d - num_values;
    if (i < 0 || i >= num_scales) continue;
    uint32_t dword[1];
    load_values(dword, reinterpret_cast<const uint32_t*>(row.scales) + i, row.in_shared);
    word.data[d] = dword[0];
  }
}

// Word w of a piece. `are_dwords`: its values may be loaded as dwords.
MOE_A2A_DEVICE LlWord word_of(const RowSource& row, bool are_dwords, int w, uint64_t epoch) {
  LlWord word;
  word.stamp = ll_stamp(epoch);
  if (are_dwords && is_all_values(row, w)) {
    load_data<false>(word, reinterpret_cast<const uint32_t*>(row.values) + w * kLlData, 0, row.in_shared);
  } else if (are_dwords && row.num_value_bytes % 4 == 0) {
    load_end(word, row, w);
  } else {
    for (int d = 0; d < kLlData; ++d) word.data[d] = any_dword(row, w * kLlData + d);
  }
  return word;
}

// Writes a piece to the words at target(rank) on each destination rank.
template <class Group, class Target>
MOE_A2A_DEVICE void send_ll(const Group& group, const Delivery& delivery, const RowSource& row, uint64_t epoch,
                            Target target) {
  const bool are_dwords = is_in_dwords(row.values);
  const int num_words = num_ll_words(row), stride = group.size();
  for (int first = group.rank(); first < num_words; first += kLlUnroll * stride) {
    LlWord word[kLlUnroll];
    MOE_A2A_UNROLL
    for (int u = 0; u < kLlUnroll; ++u) {
      if (first + u * stride < num_words) word[u] = word_of(row, are_dwords, first + u * stride, epoch);
    }
    delivery.dst_ranks.visit_from(delivery.first_dst_rank, [&](int rank) {
      LlWord* words = target(rank) + first;
      MOE_A2A_UNROLL
      for (int u = 0; u < kLlUnroll; ++u) {
        if (first + u * stride < num_words) store_ll(words + u * stride, word[u]);
      }
    });
  }
}

// ---- receiving

MOE_A2A_DEVICE void store_dword(std::byte* target, int i, uint32_t dword) {
  const uint32_t dwords[1] = {dword};
  store_values(reinterpret_cast<uint32_t*>(target) + i, dwords);
}

// Stores any word: dwords past the values go to the scales.
MOE_A2A_DEVICE void store_any_word(const RowSource& row, std::byte* target, int w, const LlWord& word) {
  const int num_values = num_value_dwords(row), num_scales = static_cast<int>(row.num_scale_bytes / 4);
  for (int d = 0; d < kLlData; ++d) {
    const int i = w * kLlData + d;
    if (i < num_values) {
      store_dword(target + row.values_offset, i, word.data[d]);
    } else if (i - num_values < num_scales) {
      store_dword(target + row.scales_offset, i - num_values, word.data[d]);
    }
  }
}

// Stores a piece's words, as they arrive, into the row at `target`; false if the wait gave up.
template <class Group>
MOE_A2A_DEVICE bool receive_ll(const Group& group, const HeapView& heap, const WaitPolicy& wait, const LlWord* words,
                               const RowSource& row, std::byte* target, uint64_t epoch, WaitSite site) {
  const int num_words = num_ll_words(row), stride = group.size();
  site.is_recorded = group.rank() == 0;
  for (int first = group.rank(); first < num_words; first += kLlUnroll * stride) {
    LlWord word[kLlUnroll] = {};
    const bool good = wait_until(epoch, site, wait, heap, {}, [&](uint64_t& seen) {
      bool all = true;
      MOE_A2A_UNROLL
      for (int u = 0; u < kLlUnroll; ++u) {
        if (first + u * stride >= num_words) continue;
        word[u] = load_ll(words + first + u * stride);
        all &= has_epoch(word[u], epoch, seen);
      }
      return all;
    });
    if (!good) return false;
    MOE_A2A_UNROLL
    for (int u = 0; u < kLlUnroll; ++u) {
      const int w = first + u * stride;
      if (w >= num_words) continue;
      if (is_all_values(row, w)) {
        for (int d = 0; d < kLlData; ++d) store_dword(target + row.values_offset, w * kLlData + d, word[u].data[d]);
      } else {
        store_any_word(row, target, w, word[u]);
      }
    }
  }
  return true;
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
