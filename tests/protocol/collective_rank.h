// A rank that calls collectives under exploration: the real kernels on a real CollectiveRegion, called as Collectives
// calls them on targets with queued launches, and checks of their results. Every value is a formula of rank, call and
// element.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "collectives/direct.h"
#include "collectives/two_shot.h"
#include "explored_rank.h"

namespace moe_a2a {

struct ModelCall {
  enum class Kind {
    kOneShot,
    kTwoShot,
    kReduceScatter,
    kAllGather,
    kRing,
    kRecursiveDoubling,
    kOneShotWords,
    kCodedTwoShot,
    kDirectAllReduce,
    kDirectReduceScatter,
    kDirectAllGather
  };
  Kind kind = Kind::kTwoShot;
  int num_elements = 8;  // of the whole tensor
  bool in_place = false;
  int odd_rank = -1;                  // makes a different call than the others
  std::optional<Kind> odd_kind = {};  // of that call, if it differs
  int refusing_rank = -1;             // whose call fails before its launch
  int late_rank = -1;                 // makes this call and those after it once another rank has given up
};

struct CollectiveCase {
  std::string name;
  std::vector<ModelCall> calls;
  int num_ranks = 2;
  int num_blocks = 1;
  uint64_t first_epoch = 0;  // launches before the first call
};

inline constexpr const char *kRefuseCollective = "refuse_collective", *kWordsLaunch = "one_shot_words",
                            *kCodedLaunch = "coded_two_shot", *kDirectLaunch = "direct_all_reduce",
                            *kGatherLaunch = "all_gather";

class CollectiveRank : public ExploredRank {
 public:
  // Most elements of a tensor; of each share in one slice; behind one signal.
  static constexpr int kMaxElements = 32, kSlice = 4, kChunk = 2;
  static constexpr int64_t kWordsBytes = 16 * sizeof(float);  // of a vector in LL words
  static constexpr LineCodec kCodec = LineCodec::kQ8;

  static RegionSize size_of(int num_ranks);

  // `symmetric` has the heaps of all ranks, one after the other.
  CollectiveRank(const CollectiveCase& shape, int rank, std::byte* symmetric, std::byte* local, Reports* reports);

  void reset();  // memory as after `first_epoch` launches
  Program program();

  const CollectiveRegion& region() const { return context_.region; }
  const float* x() const { return x_; }
  const float* out() const { return out_; }

 private:
  static float value(int rank, int call, int i) { return static_cast<float>(1 + i + 64 * (rank + 4 * call)); }
  Launch prepare(int call);
  Launch slice(int call, int number);
  Launch refuse(int call);
  Launch check(int call);

  ModelCall::Kind kind(int call, int rank) const;
  ModelCall::Kind kind(int call) const { return kind(call, rank()); }
  int num_slices(int call) const;
  int num_elements(int call) const;
  Shares shares(int call) const;
  Announcement announcement(int call, int rank) const;
  void fill_tensors(int call);
  template <class Args>
  Args share_args(int call, int number) const;
  template <class Args>
  Args vector_args(int call, int number) const;
  bool has_vectors(int call) const;  // and not shares
  bool scatters(int call) const;
  bool gathers(int call) const;
  bool is_direct(int call) const;
  bool is_coded(int call) const { return kind(call) == ModelCall::Kind::kCodedTwoShot; }
  void run(int call, int number, int block);
  CollectiveContext broken_context() const;
  void compare(int call) const;
  void compare_report(int call);
  void raise_early(Field field) const;

  CollectiveCase shape_;
  CollectiveContext context_;
  float *x_, *out_;  // in symmetric memory
};

}  // namespace moe_a2a
