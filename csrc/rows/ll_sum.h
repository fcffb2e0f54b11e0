// Partial sums that come as LL words, added up as they come.
#pragma once

#include "rows/ll_stream.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// The words of one piece of a token's row, of every rank that worked on the token. `kKeepsOwn`: this rank's own sum has
// not travelled. (Who never keeps it shall not be slower for it: a small batch is the time of its instructions.)
template <bool kKeepsOwn>
struct LlSums {
  const Context& c;
  int buffer, token;
  uint32_t attempt;
  int first_word;  // of the piece in its row
  uint64_t epoch;
  const std::byte* own_piece = nullptr;  // where the own sum is when it is kept

  // target[i] = the sum over the ranks, in ascending order and in fp32, for the elements of the piece; false when a
  // wait was given up.
  template <class T, class Group>
  MOE_A2A_DEVICE bool add(const Group& group, int num_elements, bool vector_rows, T* target) const {
    constexpr int kInDword = 4 / sizeof(T);
    const RankSet ranks = c.ws.token_ranks(buffer, token);
    const int num_words = num_ll_words((num_elements + kInDword - 1) / kInDword), stride = group.size();
    for (int first = group.rank(); first < num_words; first += kUnroll * stride) {
      float sum[kUnroll][kLlData * kInDword] = {};
      for (RankSet rest = ranks; !rest.empty();) {
        if (!add_some(rest, first, num_words, num_elements, stride, group.rank() == 0, sum, T{})) return false;
      }
      for (int u = 0; u < kUnroll; ++u) {
        const int done = (first + u * stride) * kLlData * kInDword;
        store(target + done, num_elements - done, vector_rows, sum[u]);
      }
    }
    return true;
  }

 private:
  static constexpr int kRanksInFlight = kBlockThreads > 1 ? 4 : 1, kUnroll = kBlockThreads > 1 ? 2 : 1;

  MOE_A2A_DEVICE const LlWord* words_of(int rank) const {
    return ll_words_at(c.ws.ll_combine_row, buffer, rank, token, first_word);
  }

  // Of this rank's own sum, as it would have come. (Not by word_of(), which calls for a row's last word: a call
  // spills.)
  template <class T>
  MOE_A2A_DEVICE LlWord own_word(int w, int num_elements) const {
    const int num_dwords = num_elements * static_cast<int>(sizeof(T)) / 4;
    LlWord word = {};
    for (int d = 0; d < kLlData; ++d) {
      const int i = w * kLlData + d;
      uint32_t dword[1] = {0};
      if (i < num_dwords) load_values(dword, reinterpret_cast<const uint32_t*>(own_piece) + i);
      word.data[d] = dword[0];
    }
    return word;
  }

  // Adds the words of the first ranks of `rest`, which go from it; all loads fly before the first is used.
  template <class T, class Sums>
  MOE_A2A_DEVICE bool add_some(RankSet& rest, int first, int num_words, int num_elements, int stride, bool is_recorded,
                               Sums& sum, T) const {
    LlWord word[kRanksInFlight][kUnroll] = {};
    WaitSite site{moe_op::kCombineRecv, moe_kind::kPartialWait, rest.first(), token, buffer, is_recorded};
    Refusal refusal{nullptr, attempt};
    // Calls visit(i, rank) for the first ranks of `rest`.
    const auto for_some = [&](auto visit) {
      RankSet some = rest;
      MOE_A2A_UNROLL
      for (int i = 0; i < kRanksInFlight; ++i) {
        if (some.empty()) break;
        visit(i, some.first());
        some.remove_first();
      }
    };
    if constexpr (kKeepsOwn) {
      for_some([&](int i, int rank) {
        if (rank != c.heap.rank) return;
        MOE_A2A_UNROLL
        for (int u = 0; u < kUnroll; ++u) word[i][u] = own_word<T>(first + u * stride, num_elements);
      });
    }
    const auto all_here = [&](uint64_t& seen) {
      bool all = true;
      for_some([&](int i, int rank) {
        if (kKeepsOwn && rank == c.heap.rank) return;
        const LlWord* words = words_of(rank) + first;
        bool here = true;
        MOE_A2A_UNROLL
        for (int u = 0; u < kUnroll; ++u) {
          if (first + u * stride >= num_words) continue;
          word[i][u] = load_ll(words + u * stride);
          here &= is_of(word[i][u], epoch, seen);
        }
        if (!here) {  // the last one that is missed is the one to be named
          site.peer = rank;
          refusal.signal = c.ws.combine_refusal.at(buffer, rank);
        }
        all &= here;
      });
      return all;
    };
    if (!wait_until(epoch, site, c.wait, c.heap, refusal, all_here)) return false;
    MOE_A2A_UNROLL
    for (int i = 0; i < kRanksInFlight; ++i) {
      if (rest.empty()) break;
      rest.remove_first();
      for (int u = 0; u < kUnroll; ++u) add_word<T>(word[i][u], sum[u]);
    }
    return true;
  }

  template <class T, class Sum>
  MOE_A2A_DEVICE static void add_word(const LlWord& word, Sum& sum) {
    constexpr int kInDword = 4 / sizeof(T);
    struct Elements {
      T element[kLlData * kInDword];
    };
    struct Data {
      uint32_t dword[kLlData];
    } data;
    for (int d = 0; d < kLlData; ++d) data.dword[d] = word.data[d];
    const Elements elements = std::bit_cast<Elements>(data);
    for (int j = 0; j < kLlData * kInDword; ++j) sum[j] += to_float(elements.element[j]);
  }

  // The first `count` of a word's elements, if it has so many.
  template <class T, class Sum>
  MOE_A2A_DEVICE static void store(T* target, int count, bool vector_rows, const Sum& sum) {
    constexpr int kInDword = 4 / sizeof(T), kCount = kLlData * kInDword;
    if (vector_rows && count >= kCount) {
      for (int d = 0; d < kLlData; ++d) {
        T values[kInDword];
        for (int j = 0; j < kInDword; ++j) values[j] = from_float<T>(sum[d * kInDword + j]);
        store_values(target + d * kInDword, values);
      }
      return;
    }
    for (int j = 0; j < kCount && j < count; ++j) target[j] = from_float<T>(sum[j]);
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
