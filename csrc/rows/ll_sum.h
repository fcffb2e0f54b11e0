// Sums of pieces that arrive as LL words, added as they arrive.
#pragma once

#include "rows/ll_row.h"
#include "rows/row_sum.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

// The words of one piece of a token's row from every rank of `ranks`. `kKeepsOwn`: this rank's own summand has not
// travelled. A template flag: no cost when unused, which matters for small batches.
template <bool kKeepsOwn>
struct LlSum {
  const Exchange& exchange;
  RankSet ranks;
  const WaitSite& site;              // names the token
  const Array<Signal, 2>& refusals;  // [B, R src]
  uint32_t attempt;
  const SeenStrays& seen;
  uint64_t call;                         // see Refusal
  int first_word;                        // first word of the piece in its row
  const std::byte* own_piece = nullptr;  // this rank's own summand, if kept

  // target[i] = the sum over the ranks, ascending and in fp32, for the elements of the `part`-th of `num_parts` parts
  // of the piece; false if a wait gave up. `num_elements`, `target`: of the piece.
  template <class T, class Group>
  MOE_A2A_DEVICE bool add(const Group& group, int part, int num_parts, int num_elements, bool vector_rows,
                          T* target) const {
    constexpr int kInDword = 4 / sizeof(T);
    const int num_words = num_ll_words((num_elements + kInDword - 1) / kInDword), stride = group.size();
    const int in_part = num_parts == 1 ? num_words : (num_words + num_parts - 1) / num_parts, begin = part * in_part;
    const int end = begin + in_part < num_words ? begin + in_part : num_words;
    for (int first = begin + group.rank(); first < end; first += kUnroll * stride) {
      float sum[kUnroll][kInWord<T>] = {};
      for (RankSet rest = ranks; !rest.empty();) {
        if (!add_some(rest, first, end, num_elements, stride, group.rank() == 0, sum, T{})) return false;
      }
      for (int u = 0; u < kUnroll; ++u) {
        if (first + u * stride >= end) break;
        const int done = (first + u * stride) * kInWord<T>;
        store_rounded(target + done, num_elements - done, vector_rows, sum[u]);
      }
    }
    return true;
  }

 private:
  static constexpr int kRanksInFlight = kBlockThreads > 1 ? 4 : 1, kUnroll = kBlockThreads > 1 ? 2 : 1;

  // Adds the words of the first ranks of `rest` and removes those ranks. Issues all loads before the first use.
  template <class T, class Sums>
  MOE_A2A_DEVICE bool add_some(RankSet& rest, int first, int end, int num_elements, int stride, bool is_recorded,
                               Sums& sum, T) const {
    const int own_rank = exchange.heap.rank;
    LlWord word[kRanksInFlight][kUnroll] = {};
    WaitSite missing{site.operation, site.awaited, 0, site.token, site.buffer, is_recorded};
    Refusal refused;
    missing.peer = rest.first();
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
      const int num_dwords = num_elements * static_cast<int>(sizeof(T)) / 4;
      for_some([&](int i, int rank) {
        if (rank != own_rank) return;
        MOE_A2A_UNROLL
        for (int u = 0; u < kUnroll; ++u) {
          const int begin = (first + u * stride) * kLlData;
          load_data<true>(word[i][u], reinterpret_cast<const uint32_t*>(own_piece) + begin, num_dwords - begin);
        }
      });
    }
    const auto all_here = [&](uint64_t& seen) {
      bool all = true;
      for_some([&](int i, int rank) {
        if (kKeepsOwn && rank == own_rank) return;
        const LlWord* words = ll_words_at(exchange.ll_words, exchange.buffer, rank, site.token, first_word) + first;
        bool here = true;
        MOE_A2A_UNROLL
        for (int u = 0; u < kUnroll; ++u) {
          if (first + u * stride >= end) continue;
          word[i][u] = load_ll(words + u * stride);
          here &= has_epoch(word[i][u], exchange.epoch, seen);
        }
        if (!here) {  // the report names the last missing rank
          missing.peer = rank;
          refused = {refusals.at(exchange.buffer, rank), attempt, this->seen.of_rank[rank], call};
        }
        all &= here;
      });
      return all;
    };
    if (!wait_until(exchange.epoch, missing, exchange.wait, exchange.heap, refused, all_here)) return false;
    MOE_A2A_UNROLL
    for (int i = 0; i < kRanksInFlight; ++i) {
      if (rest.empty()) break;
      rest.remove_first();
      for (int u = 0; u < kUnroll; ++u) {
        const auto values = values_of<T>(word[i][u]);
        for (int j = 0; j < kInWord<T>; ++j) sum[u][j] += to_float(values.value[j]);
      }
    }
    return true;
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
