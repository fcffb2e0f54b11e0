#include "trace_export/tracks.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <tuple>

namespace moe_a2a::trace_export {
namespace {

// By warp, then in nesting order: by begin; if two begin together, the longer one first.
std::vector<int64_t> nesting_order(std::span<const Slice> slices) {
  const auto key = [&](int64_t i) {
    const Slice& s = slices[i];
    return std::tuple(s.rank, s.block, s.warp, s.begin_ns, -s.end_ns);
  };
  std::vector<int64_t> order(slices.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return key(a) < key(b); });
  return order;
}

// The tracks of one warp, filled in nesting order.
class WarpTracks {
 public:
  WarpTracks(std::vector<Track>& tracks, const Slice& first)
      : tracks_(tracks),
        first_track_(tracks.size()),
        rank_(first.rank),
        block_(first.block),
        name_(first.block == kNone ? kPhases
                                   : "block " + std::to_string(first.block) + " warp " + std::to_string(first.warp)) {}

  void add(const Slice& slice, int64_t i, bool takes_others) {
    for (size_t lane = 0;; ++lane) {
      if (lane == open_.size()) {
        tracks_.push_back({rank_, block_, lane == 0 ? name_ : name_ + " (" + std::to_string(lane + 1) + ")", {}});
        open_.emplace_back();
      }
      std::vector<Open>& open = open_[lane];
      while (!open.empty() && open.back().end_ns <= slice.begin_ns) open.pop_back();
      if (!open.empty() && (!open.back().takes_others || open.back().end_ns < slice.end_ns)) continue;
      open.push_back({slice.end_ns, takes_others});
      tracks_[first_track_ + lane].slices.push_back(i);
      return;
    }
  }

 private:
  // A slice that the next one may nest in.
  struct Open {
    int64_t end_ns;
    bool takes_others;
  };

  std::vector<Track>& tracks_;
  size_t first_track_;
  int32_t rank_, block_;
  std::string name_;
  std::vector<std::vector<Open>> open_;  // per lane, innermost last
};

}  // namespace

std::vector<Track> lay_out(const Timeline& timeline) {
  const std::span<const Slice> slices = timeline.slices;
  const std::vector<int64_t> arriving = ends_of(timeline).arriving;
  const auto warp_of = [&](int64_t i) { return std::tuple(slices[i].rank, slices[i].block, slices[i].warp); };
  const std::vector<int64_t> order = nesting_order(slices);
  std::vector<Track> tracks;
  for (size_t i = 0; i < order.size();) {
    const auto warp = warp_of(order[i]);
    WarpTracks warp_tracks(tracks, slices[order[i]]);
    for (; i < order.size() && warp_of(order[i]) == warp; ++i) {
      warp_tracks.add(slices[order[i]], order[i], arriving[order[i]] == kNone);
    }
  }
  return tracks;
}

ArrowEnds ends_of(const Timeline& timeline) {
  ArrowEnds ends{std::vector<int64_t>(timeline.slices.size(), kNone),
                 std::vector<int64_t>(timeline.slices.size(), kNone)};
  for (size_t i = 0; i < timeline.arrows.size(); ++i) {
    ends.leaving[timeline.arrows[i].source] = static_cast<int64_t>(i);
    ends.arriving[timeline.arrows[i].sink] = static_cast<int64_t>(i);
  }
  return ends;
}

int64_t flight_begin_ns(const Timeline& timeline, int64_t arrow) {
  const Slice& wait = timeline.slices[timeline.arrows[arrow].sink];
  return std::clamp(timeline.slices[timeline.arrows[arrow].source].begin_ns + 1, wait.begin_ns, wait.end_ns);
}

std::vector<int32_t> ranks_of(const Timeline& timeline) {
  std::set<int32_t> ranks;
  for (const Slice& slice : timeline.slices) ranks.insert(slice.rank);
  for (const CounterSample& sample : timeline.samples) ranks.insert(sample.rank);
  return {ranks.begin(), ranks.end()};
}

}  // namespace moe_a2a::trace_export
