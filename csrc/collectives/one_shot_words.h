// One-shot all-reduce of a small vector as LL words: a rank writes its values to every rank and merges those of all as
// they arrive. It waits for no signal and no fence; the bits equal those of OneShot.
//
// A thread that waits for values also waits for the announcements of their ranks, and stores nothing unless they equal
// its own.
#pragma once

#include "collectives/one_shot.h"
#include "rows/ll_row.h"

namespace moe_a2a {

struct OneShotWordsArgs : OneShotArgs {};

}  // namespace moe_a2a

namespace moe_a2a::inline MOE_A2A_TARGET {

class OneShotWords {
 public:
  using Args = OneShotWordsArgs;
  static constexpr const char* kName = "one_shot_all_reduce";

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte*) {
    run_call(args, collective_op::kOneShot, Seen::kWords, grid, block, [&](const Part& part) {
      const OneShotWords words(args, part, block);
      const int num_chunks = args.count > 0 ? args.num_chunks : 1;  // without values, only the announcements
      for (int i = grid.rank(); i < num_chunks; i += grid.size()) words.push(i);
      if (grid.rank() == grid.size() - 1) {
        announce(part, block);
        signal_call(part, block);
      }
      bool good = true;
      for (int i = grid.rank(); good && i < num_chunks; i += grid.size()) good = words.receive(i, grid);
      return good;
    });
  }

 private:
  static constexpr int kRanksInFlight = kBlockThreads > 1 ? 4 : 1, kUnroll = kBlockThreads > 1 ? 2 : 1;

  enum class Arrival { kGood, kGaveUp, kOtherCall };

  MOE_A2A_DEVICE OneShotWords(const Args& args, const Part& part, const Block& block)
      : args_(args), part_(part), block_(block) {}

  // Writes chunk i of this rank's vector to all other ranks.
  MOE_A2A_DEVICE void push(int i) const {
    const CollectiveContext& c = args_.context;
    if (part_.num_ranks() == 1) return;
    const uint64_t start = trace_now();
    const Delivery delivery{part_.others(), i, (part_.rank() + 1) % part_.num_ranks()};
    LlWord* local = words_of(part_.rank(), i);
    send_ll(block_, delivery, chunk_of(i), part_.epoch, [&](int rank) { return c.heap.peer(rank, local); });
    record_chunk(part_, block_, collective_kind::kPush, start, i);
  }

  // Merges chunk i of all ranks into out; false if a rank did not arrive or makes a different call.
  MOE_A2A_DEVICE bool receive(int i, const Grid& grid) const {
    const uint64_t start = trace_now();
    auto arrival = Arrival::kGood;
    with_element_type(args_.dtype, [&](auto element) {
      with_operator(args_.op, [&](auto op) { arrival = reduce_chunk<decltype(element), decltype(op)>(i); });
    });
    if (block_.any(arrival == Arrival::kOtherCall)) {
      meet(part_, grid, block_);  // reports which calls differ
      return false;
    }
    record_chunk(part_, block_, TraceKind::kReduce, start, i);
    return !block_.any(arrival == Arrival::kGaveUp);
  }

  // A thread sends and merges the same words: `out` may be `x`.
  template <class T, class Op>
  MOE_A2A_DEVICE Arrival reduce_chunk(int i) const {
    const RowSource own = chunk_of(i);
    const int count = own_count(i), num_words = num_ll_words(own), stride = block_.size();
    T* out = reinterpret_cast<T*>(args_.out) + i * args_.chunk;
    for (int first = block_.rank(); first < (num_words > 0 ? num_words : 1); first += kUnroll * stride) {
      float merged[kUnroll][kInWord<T>] = {};
      for (int r = 0; r < part_.num_ranks(); r += kRanksInFlight) {
        const Arrival arrival = merge_some<T, Op>(r, i, own, first, num_words, merged);
        if (arrival != Arrival::kGood) return arrival;
      }
      MOE_A2A_UNROLL
      for (int u = 0; u < kUnroll; ++u) {
        const int begin = (first + u * stride) * kInWord<T>;
        divide(merged[u], divisor_of(args_.op, part_.num_ranks()));
        T* target = out + begin;
        store_rounded(target, count - begin, is_in_dwords(target), merged[u]);
      }
    }
    return Arrival::kGood;
  }

  // Merges this thread's words of the ranks from `begin` on. Issues all loads before the first use.
  template <class T, class Op>
  MOE_A2A_DEVICE Arrival merge_some(int begin, int i, const RowSource& own, int first, int num_words,
                                    float (&merged)[kUnroll][kInWord<T>]) const {
    const CollectiveContext& c = args_.context;
    const int stride = block_.size();
    LlWord word[kRanksInFlight][kUnroll] = {};
    // Calls visit(j, u, rank, w) for each of the words.
    const auto for_words = [&](auto visit) {
      MOE_A2A_UNROLL
      for (int j = 0; j < kRanksInFlight; ++j) {
        if (begin + j >= part_.num_ranks()) break;
        MOE_A2A_UNROLL
        for (int u = 0; u < kUnroll; ++u) {
          if (first + u * stride < num_words) visit(j, u, begin + j, first + u * stride);
        }
      }
    };
    const bool are_dwords = is_in_dwords(own.values);
    for_words([&](int j, int u, int rank, int w) {
      if (rank == part_.rank()) word[j][u] = word_of(own, are_dwords, w, part_.epoch);
    });
    WaitSite missing{part_.operation, collective_kind::kCallWait, begin, -1, part_.half(), block_.rank() == 0};
    bool is_other_call = false;
    const auto all_here = [&](uint64_t& seen) {
      bool all = announcements_agree(begin, missing, seen, is_other_call);
      for_words([&](int j, int u, int rank, int w) {
        if (rank == part_.rank()) return;
        word[j][u] = load_ll(words_of(rank, i) + w);
        if (has_epoch(word[j][u], part_.epoch, seen)) return;
        if (all) await(missing, collective_kind::kChunkWait, rank, i);
        all = false;
      });
      return all || is_other_call;
    };
    if (!wait_until(part_.epoch, missing, c.wait, c.heap, {}, all_here)) return Arrival::kGaveUp;
    if (is_other_call) return Arrival::kOtherCall;
    for_words([&](int j, int u, int rank, int) { merge_word<T, Op>(rank == 0, word[j][u], merged[u]); });
    return Arrival::kGood;
  }

  // Whether the ranks from `begin` on have announced their calls, and whether one of them makes another call.
  MOE_A2A_DEVICE bool announcements_agree(int begin, WaitSite& missing, uint64_t& seen, bool& is_other_call) const {
    bool all = true;
    MOE_A2A_UNROLL
    for (int j = 0; j < kRanksInFlight; ++j) {
      const int rank = begin + j;
      if (rank >= part_.num_ranks() || rank == part_.rank()) continue;
      Announcement theirs;
      if (has_announced(part_, rank, theirs, seen)) {
        is_other_call |= !are_same(theirs, args_.announcement);
        continue;
      }
      await(missing, collective_kind::kCallWait, rank, -1);
      all = false;
    }
    return all;
  }

  MOE_A2A_DEVICE static void await(WaitSite& site, TraceKind awaited, int rank, int chunk) {
    site.awaited = awaited;
    site.peer = rank;
    site.token = chunk;
  }

  template <class T, class Op>
  MOE_A2A_DEVICE static void merge_word(bool is_first, const LlWord& word, float (&merged)[kInWord<T>]) {
    const auto values = values_of<T>(word);
    MOE_A2A_UNROLL
    for (int e = 0; e < kInWord<T>; ++e) {
      const float value = to_float(values.value[e]);
      merged[e] = is_first ? value : Op::merge(merged[e], value);
    }
  }

  MOE_A2A_DEVICE int own_count(int i) const { return args_.count > 0 ? args_.size_of_chunk(i) : 0; }
  MOE_A2A_DEVICE RowSource chunk_of(int i) const {
    const int size = size_of(args_.dtype);
    return {.values = args_.x + i * args_.chunk * size, .num_value_bytes = int64_t{own_count(i)} * size};
  }
  // Where the words of chunk i of `src` lie.
  MOE_A2A_DEVICE LlWord* words_of(int src, int i) const {
    const int chunk_words = num_ll_words(static_cast<int>(args_.chunk * size_of(args_.dtype) / 4));
    return reinterpret_cast<LlWord*>(args_.context.region.words.at(part_.half(), src)) + i * chunk_words;
  }

  const Args& args_;
  const Part& part_;
  const Block& block_;
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
