// Rows of small batches on their way as LL words. Word w of a piece holds the dwords w * kLlData and those behind it:
// first its values, the last of them filled up, then its scales.
//
// A small batch is the time of its instructions, one after the other in warps that wait for nothing else. So what
// nearly all words have in common comes first and straight, and what few need is called.
#pragma once

#include <bit>

#include "comm/ll_word.h"
#include "rows/row.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// Words of a thread that are in flight together.
inline constexpr int kLlUnroll = kBlockThreads > 1 ? 3 : 1;

MOE_A2A_HOST_DEVICE int num_value_dwords(const RowSource& row) {
  return static_cast<int>((row.num_value_bytes + 3) / 4);
}
MOE_A2A_HOST_DEVICE int num_ll_words(const RowSource& row) {
  return num_ll_words(num_value_dwords(row) + static_cast<int>(row.num_scale_bytes / 4));
}
// Words that each piece of a row takes: as many as the first, which is the longest.
MOE_A2A_DEVICE int ll_words_of_piece(const MoeConfig& config, DType dtype) {
  return num_ll_words(part_of_row(config, dtype, Piece::of(config, 0)));
}
// Whether word w holds nothing but whole dwords of values.
MOE_A2A_DEVICE bool is_of_values(const RowSource& row, int w) {
  return 4 * (w + 1) * kLlData <= static_cast<int>(row.num_value_bytes);
}

// ---- sending

// Any dword of a piece, its values byte by byte. Behind the end: 0.
MOE_A2A_RARE uint32_t dword_of(RowSource row, int i) {
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

MOE_A2A_DEVICE LlWord word_of(const RowSource& row, bool are_dwords, int w, uint64_t epoch) {
  LlWord word;
  word.stamp = ll_stamp(epoch);
  if (are_dwords && is_of_values(row, w)) {
    const uint32_t* values = reinterpret_cast<const uint32_t*>(row.values) + w * kLlData;
    for (int d = 0; d < kLlData; ++d) {
      uint32_t dword[1];
      load_values(dword, values + d, row.in_shared);
      word.data[d] = dword[0];
    }
  } else {
    for (int d = 0; d < kLlData; ++d) word.data[d] = dword_of(row, w * kLlData + d);
  }
  return word;
}

// Writes a piece to the words at target(rank) on each rank of `members`, beginning with `turn`.
template <class Group, class Target>
MOE_A2A_DEVICE void send_ll(const Group& group, const RankSet& members, int turn, const RowSource& row, uint64_t epoch,
                            Target target) {
  const bool are_dwords = !kAlignedVectors || reinterpret_cast<uint64_t>(row.values) % 4 == 0;
  const int num_words = num_ll_words(row), stride = group.size();
  for (int first = group.rank(); first < num_words; first += kLlUnroll * stride) {
    LlWord word[kLlUnroll];
    MOE_A2A_UNROLL
    for (int u = 0; u < kLlUnroll; ++u) {
      if (first + u * stride < num_words) word[u] = word_of(row, are_dwords, first + u * stride, epoch);
    }
    members.visit_from(turn, [&](int rank) {
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

// Any word: what lies behind the end of the values goes to the scales.
MOE_A2A_RARE void store_word(RowSource row, std::byte* target, int w, LlWord word) {
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

// Takes the words of a piece as they come and puts them into the row at `target`; false when the wait was given up.
template <class Group>
MOE_A2A_DEVICE bool receive_ll(const Group& group, const Context& c, const LlWord* words, const RowSource& row,
                               std::byte* target, uint64_t epoch, WaitSite site) {
  const int num_words = num_ll_words(row), stride = group.size();
  site.is_recorded = group.rank() == 0;
  for (int first = group.rank(); first < num_words; first += kLlUnroll * stride) {
    LlWord word[kLlUnroll] = {};
    const bool good = wait_until(epoch, site, c.wait, c.heap, {}, [&](uint64_t& seen) {
      bool all = true;
      MOE_A2A_UNROLL
      for (int u = 0; u < kLlUnroll; ++u) {
        if (first + u * stride >= num_words) continue;
        word[u] = load_ll(words + first + u * stride);
        all &= is_of(word[u], epoch, seen);
      }
      return all;
    });
    if (!good) return false;
    MOE_A2A_UNROLL
    for (int u = 0; u < kLlUnroll; ++u) {
      const int w = first + u * stride;
      if (w >= num_words) continue;
      if (is_of_values(row, w)) {
        for (int d = 0; d < kLlData; ++d) store_dword(target + row.values_offset, w * kLlData + d, word[u].data[d]);
      } else {
        store_word(row, target, w, word[u]);
      }
    }
  }
  return true;
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET
