// A trace is a sequence of packets: first tracks and names, then each slice as a begin and an end.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <protozero/pbf_writer.hpp>

#include "trace_export/output.h"
#include "trace_export/perfetto_fields.h"
#include "trace_export/tracks.h"

namespace moe_a2a::trace_export {
namespace {

using Json = nlohmann::ordered_json;
using Message = protozero::pbf_writer;

constexpr uint32_t kSequence = 1;
constexpr const char* kArguments[] = {"peer", "token", "polls", "bytes", "expert", "rows"};

uint64_t rank_uuid(int32_t rank) { return static_cast<uint64_t>(rank + 1) << 32; }
uint64_t counter_uuid(int32_t rank, int32_t counter) { return rank_uuid(rank) + (1u << 31) + counter; }
constexpr uint64_t kFirstGroup = uint64_t{1} << 30;  // ids of block groups, counted from the rank's

// Writes a metadata value, recursively, for the UI's table of arguments.
void annotate(Message& annotation, const Json& value) {
  using namespace annotation_field;
  if (value.is_object()) {
    for (const auto& [key, part] : value.items()) {
      Message entry(annotation, kDictEntries);
      entry.add_string(kName, key);
      annotate(entry, part);
    }
  } else if (value.is_array()) {
    for (const Json& part : value) {
      Message entry(annotation, kArrayValues);
      annotate(entry, part);
    }
  } else if (value.is_boolean()) {
    annotation.add_bool(kBool, value.get<bool>());
  } else if (value.is_number_integer()) {
    annotation.add_int64(kInt, value.get<int64_t>());
  } else if (value.is_number()) {
    annotation.add_double(kDouble, value.get<double>());
  } else {
    annotation.add_string(kString, value.is_string() ? value.get<std::string>() : value.dump());
  }
}

class Writer {
 public:
  Writer(const Timeline& timeline, const Sink& sink)
      : timeline_(timeline), tracks_(lay_out(timeline)), ends_(ends_of(timeline)), out_(sink) {}

  void write() {
    write_names();
    write_tracks();
    write_about();
    for (size_t t = 0; t < tracks_.size(); ++t) write_track(tracks_[t], uuid_of(t));
    for (const CounterSample& sample : timeline_.samples) {
      event(sample.time_ns, counter_uuid(sample.rank, sample.name), event_field::kCounter,
            [&](Message& event) { event.add_int64(event_field::kCounterValue, sample.value); });
    }
    out_.flush();
  }

 private:
  template <class Fill>
  void packet(const Fill& fill) {
    {
      Message trace(out_.text);
      Message packet(trace, trace_field::kPacket);
      packet.add_uint32(packet_field::kSequenceId, kSequence);
      fill(packet);
    }
    out_.flush_if_full();
  }

  // Names are written once; events refer to them by number, from 1.
  void write_names() {
    packet([&](Message& packet) {
      packet.add_uint32(packet_field::kSequenceFlags, packet_field::kIncrementalStateCleared);
      Message interned(packet, packet_field::kInternedData);
      const auto intern = [&](Field list, uint64_t iid, const std::string& name) {
        Message entry(interned, list);
        entry.add_uint64(interned_field::kIid, iid);
        entry.add_string(interned_field::kName, name);
      };
      uint64_t iid = 0;
      for (const std::string& name : timeline_.slice_names) intern(interned_field::kEventNames, ++iid, name);
      intern(interned_field::kEventNames, ++iid, kFlight);
      iid = 0;
      for (const char* name : kArguments) intern(interned_field::kDebugAnnotationNames, ++iid, name);
    });
  }

  template <class Fill>
  void track(uint64_t uuid, const std::string& name, const Fill& fill) {
    packet([&](Message& packet) {
      Message track(packet, packet_field::kTrackDescriptor);
      track.add_uint64(track_field::kUuid, uuid);
      track.add_string(track_field::kName, name);
      fill(track);
    });
  }

  // The UI collapses groups but shows a group's own slices or samples. So a rank's phases are the parent of its blocks,
  // and its share of waiting warps is the parent of its counters: the first screen has these two rows per rank. The UI
  // sorts top-level tracks by name. (It gathers those without children in a separate group, and a collapsed process
  // shows nothing.)
  void write_tracks() {
    for (const int32_t rank : ranks_of(timeline_)) {
      track(rank_uuid(rank), name_of(rank),
            [](Message& track) { track.add_enum(track_field::kChildOrdering, track_field::kExplicit); });
      write_counters(rank);
    }
    for (size_t t = 0; t < tracks_.size(); ++t) write_slice_track(t);
  }

  void write_counters(int32_t rank) {
    const std::vector<std::string>& names = timeline_.counter_names;
    const auto top = static_cast<int32_t>(std::find(names.begin(), names.end(), kWaiting) - names.begin());
    const auto write = [&](int32_t c, const std::string& name) {
      track(counter_uuid(rank, c), name, [&](Message& track) {
        if (c != top) track.add_uint64(track_field::kParentUuid, counter_uuid(rank, top));
        Message counter(track, track_field::kCounter);
        const bool in_bytes = name.starts_with("bytes");
        counter.add_enum(track_field::kCounterUnit, in_bytes ? track_field::kUnitBytes : track_field::kUnitCount);
      });
    };
    write(top, name_of(rank) + " " + kWaiting);  // before its children
    for (int32_t c = 0; c < static_cast<int32_t>(names.size()); ++c) {
      if (c != top) write(c, names[c]);
    }
  }

  // A block with several tracks gets a group.
  void write_slice_track(size_t t) {
    const Track& own = tracks_[t];
    const auto is_beside = [&](size_t other) {
      return other < tracks_.size() && tracks_[other].rank == own.rank && tracks_[other].block == own.block;
    };
    const bool is_first = !is_beside(t - 1);
    if (own.block == kNone && is_first) return;  // the rank's own track
    const bool has_group = own.block != kNone && (!is_first || is_beside(t + 1));
    const uint64_t group = rank_uuid(own.rank) + kFirstGroup + static_cast<uint64_t>(own.block);
    if (has_group && is_first) {
      track(group, "block " + std::to_string(own.block), [&](Message& track) {
        track.add_uint64(track_field::kParentUuid, rank_uuid(own.rank));
        track.add_enum(track_field::kChildOrdering, track_field::kExplicit);
        track.add_int32(track_field::kSiblingOrderRank, static_cast<int32_t>(t));
      });
    }
    track(uuid_of(t), own.name, [&](Message& track) {
      track.add_uint64(track_field::kParentUuid, has_group ? group : rank_uuid(own.rank));
      track.add_int32(track_field::kSiblingOrderRank, static_cast<int32_t>(t));
    });
  }

  // A rank's phases are on the rank's own track.
  uint64_t uuid_of(size_t t) const {
    const Track& track = tracks_[t];
    const bool is_of_rank = track.block == kNone && (t == 0 || tracks_[t - 1].rank != track.rank);
    return is_of_rank ? rank_uuid(track.rank) : rank_uuid(track.rank) + 1 + t;
  }
  // Zero-padded, so that sorting by name sorts the ranks.
  std::string name_of(int32_t rank) const {
    const std::string number = std::to_string(rank), most = std::to_string(ranks_of(timeline_).back());
    return "rank " + std::string(most.size() - number.size(), '0') + number;
  }

  template <class Fill>
  void event(int64_t time_ns, uint64_t track, int type, const Fill& fill) {
    packet([&](Message& packet) {
      packet.add_uint64(packet_field::kTimestamp, static_cast<uint64_t>(time_ns));
      packet.add_uint32(packet_field::kSequenceFlags, packet_field::kNeedsIncrementalState);
      Message event(packet, packet_field::kTrackEvent);
      event.add_enum(event_field::kType, type);
      event.add_uint64(event_field::kTrackUuid, track);
      fill(event);
    });
  }

  void write_about() {
    if (tracks_.empty()) return;
    const Json about = Json::parse(timeline_.about);
    event(0, uuid_of(0), event_field::kInstant, [&](Message& event) {
      event.add_string(event_field::kName, kAbout);
      for (const auto& [key, value] : about.items()) {
        Message annotation(event, event_field::kDebugAnnotations);
        annotation.add_string(annotation_field::kName, key);
        annotate(annotation, value);
      }
    });
  }

  // Closes each slice before the next one that is not nested in it begins.
  void write_track(const Track& track, uint64_t uuid) {
    std::vector<int64_t> ends;
    const auto close = [&] {
      event(ends.back(), uuid, event_field::kSliceEnd, [](Message&) {});
      ends.pop_back();
    };
    for (const int64_t i : track.slices) {
      const Slice& slice = timeline_.slices[i];
      while (!ends.empty() && ends.back() <= slice.begin_ns) close();
      write_begin(uuid, i);
      if (!slice.instant) ends.push_back(slice.end_ns);
      if (ends_.arriving[i] != kNone) {
        write_flight_begin(uuid, slice, ends_.arriving[i]);
        ends.push_back(slice.end_ns);
      }
    }
    while (!ends.empty()) close();
  }

  void write_begin(uint64_t track, int64_t i) {
    const Slice& slice = timeline_.slices[i];
    const int type = slice.instant ? event_field::kInstant : event_field::kSliceBegin;
    event(slice.begin_ns, track, type, [&](Message& event) {
      event.add_uint64(event_field::kNameIid, static_cast<uint64_t>(slice.name) + 1);
      annotate_with(event, {slice.peer, slice.token, slice.polls, slice.bytes, slice.expert, slice.rows});
      if (ends_.leaving[i] != kNone) event.add_fixed64(event_field::kFlowIds, flow_id(ends_.leaving[i]));
    });
  }

  void write_flight_begin(uint64_t track, const Slice& wait, int64_t arrow) {
    event(flight_begin_ns(timeline_, arrow), track, event_field::kSliceBegin, [&](Message& event) {
      event.add_uint64(event_field::kNameIid, timeline_.slice_names.size() + 1);
      annotate_with(event, {wait.peer, wait.token});
      event.add_fixed64(event_field::kTerminatingFlowIds, flow_id(arrow));
    });
  }

  // In the order of kArguments.
  static void annotate_with(Message& event, std::initializer_list<int64_t> values) {
    uint64_t iid = 0;
    for (const int64_t value : values) {
      ++iid;
      if (value == kNone) continue;
      Message annotation(event, event_field::kDebugAnnotations);
      annotation.add_uint64(annotation_field::kNameIid, iid);
      annotation.add_int64(annotation_field::kInt, value);
    }
  }

  static uint64_t flow_id(int64_t arrow) { return static_cast<uint64_t>(arrow) + 1; }

  const Timeline& timeline_;
  const std::vector<Track> tracks_;
  const ArrowEnds ends_;
  Output out_;
};

}  // namespace

void write_perfetto(const Timeline& timeline, const Sink& sink) { Writer(timeline, sink).write(); }

}  // namespace moe_a2a::trace_export
