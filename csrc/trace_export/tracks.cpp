#include "trace_export/tracks.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <tuple>

namespace moe_a2a::trace_export {
namespace {

// By warp, then as they nest: by begin, of two that begin together the longer one first.
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
        name_("block " + std::to_string(first.block) + " warp " + std::to_string(first.warp)) {}

  void add(std::span<const Slice> slices, int64_t i) {
    const Slice& slice = slices[i];
    for (size_t lane = 0;; ++lane) {
      if (lane == open_.size()) {
        tracks_.push_back({rank_, lane == 0 ? name_ : name_ + " (" + std::to_string(lane + 1) + ")", {}});
        open_.emplace_back();
      }
      std::vector<int64_t>& ends = open_[lane];  // of the slices that the next one may lie in, the innermost last
      while (!ends.empty() && ends.back() <= slice.begin_ns) ends.pop_back();
      if (!ends.empty() && ends.back() < slice.end_ns) continue;
      ends.push_back(slice.end_ns);
      tracks_[first_track_ + lane].slices.push_back(i);
      return;
    }
  }

 private:
  std::vector<Track>& tracks_;
  size_t first_track_;
  int32_t rank_;
  std::string name_;
  std::vector<std::vector<int64_t>> open_;
};

}  // namespace

std::vector<Track> lay_out(std::span<const Slice> slices) {
  const auto warp_of = [&](int64_t i) { return std::tuple(slices[i].rank, slices[i].block, slices[i].warp); };
  const std::vector<int64_t> order = nesting_order(slices);
  std::vector<Track> tracks;
  for (size_t i = 0; i < order.size();) {
    const auto warp = warp_of(order[i]);
    WarpTracks warp_tracks(tracks, slices[order[i]]);
    for (; i < order.size() && warp_of(order[i]) == warp; ++i) warp_tracks.add(slices, order[i]);
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

std::vector<int32_t> ranks_of(const Timeline& timeline) {
  std::set<int32_t> ranks;
  for (const Slice& slice : timeline.slices) ranks.insert(slice.rank);
  for (const CounterSample& sample : timeline.samples) ranks.insert(sample.rank);
  return {ranks.begin(), ranks.end()};
}

}  // namespace moe_a2a::trace_export
