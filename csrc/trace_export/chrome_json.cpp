// The format: "Trace Event Format", Google, chapters "Complete Events", "Flow Events", "Metadata Events". Perfetto
// reads `ts` and `dur` as microseconds with three decimals.
#include <nlohmann/json.hpp>

#include "trace_export/output.h"
#include "trace_export/tracks.h"

namespace moe_a2a::trace_export {
namespace {

using Json = nlohmann::ordered_json;

double microseconds(int64_t ns) { return static_cast<double>(ns) / 1000; }

class Writer {
 public:
  Writer(const Timeline& timeline, const Sink& sink)
      : timeline_(timeline), tracks_(lay_out(timeline)), ends_(ends_of(timeline)), out_(sink) {}

  void write() {
    const Json about = Json::parse(timeline_.about);
    out_.text += R"({"displayTimeUnit":"ns","otherData":)" + about.dump() + ",\"traceEvents\":[\n";
    write_names();
    write_about(about);
    for (size_t t = 0; t < tracks_.size(); ++t) {
      const int64_t pid = process_id(tracks_[t].rank), tid = thread_id(t);
      for (const int64_t i : tracks_[t].slices) write_slice(pid, tid, i);
    }
    for (const CounterSample& sample : timeline_.samples) write_sample(sample);
    out_.text += "\n]}\n";
    out_.flush();
  }

 private:
  void event(const Json& event) {
    if (!first_) out_.text += ",\n";
    first_ = false;
    out_.text += event.dump();
    out_.flush_if_full();
  }

  void name(const char* what, int64_t pid, int64_t tid, const char* field, const Json& value) {
    event({{"ph", "M"}, {"name", what}, {"pid", pid}, {"tid", tid}, {"args", {{field, value}}}});
  }

  void write_names() {
    for (const int32_t rank : ranks_of(timeline_)) {
      name("process_name", process_id(rank), 0, "name", "rank " + std::to_string(rank));
      name("process_sort_index", process_id(rank), 0, "sort_index", rank);
    }
    for (size_t t = 0; t < tracks_.size(); ++t) {
      const int64_t pid = process_id(tracks_[t].rank), tid = thread_id(t);
      name("thread_name", pid, tid, "name", tracks_[t].name);
      name("thread_sort_index", pid, tid, "sort_index", t);
    }
  }

  // Perfetto does not show otherData, so write it again as an event that can be clicked.
  void write_about(const Json& about) {
    if (tracks_.empty()) return;
    const int64_t pid = process_id(tracks_.front().rank);
    name("thread_name", pid, kAboutThread, "name", kAbout);
    event({{"ph", "i"}, {"s", "t"}, {"pid", pid}, {"tid", kAboutThread}, {"ts", 0}, {"name", kAbout}, {"args", about}});
  }

  // The UI shows a counter as its name followed by the key of its value; the name's last word becomes the key.
  void write_sample(const CounterSample& sample) {
    const std::string& name = timeline_.counter_names[sample.name];
    const size_t space = name.rfind(' ');
    event({{"ph", "C"},
           {"pid", process_id(sample.rank)},
           {"name", name.substr(0, space)},
           {"ts", microseconds(sample.time_ns)},
           {"args", {{name.substr(space + 1), sample.value}}}});
  }

  void write_slice(int64_t pid, int64_t tid, int64_t i) {
    const Slice& slice = timeline_.slices[i];
    Json args = Json::object();
    if (slice.peer != kNone) args["peer"] = slice.peer;
    if (slice.token != kNone) args["token"] = slice.token;
    if (slice.polls != kNone) args["polls"] = slice.polls;
    if (slice.bytes != kNone) args["bytes"] = slice.bytes;
    if (slice.expert != kNone) args["expert"] = slice.expert;
    if (slice.rows != kNone) args["rows"] = slice.rows;
    write_span(pid, tid, timeline_.slice_names[slice.name], slice.begin_ns, slice.end_ns, std::move(args));
    if (ends_.leaving[i] != kNone) write_arrow_end("s", pid, tid, slice.begin_ns, ends_.leaving[i]);
    if (const int64_t arrow = ends_.arriving[i]; arrow != kNone) {
      const int64_t begin_ns = flight_begin_ns(timeline_, arrow);
      write_span(pid, tid, kFlight, begin_ns, slice.end_ns, {{"peer", slice.peer}, {"token", slice.token}});
      write_arrow_end("f", pid, tid, begin_ns, arrow);
    }
  }

  void write_span(int64_t pid, int64_t tid, const std::string& name, int64_t begin_ns, int64_t end_ns, Json args) {
    event({{"ph", "X"},
           {"pid", pid},
           {"tid", tid},
           {"name", name},
           {"ts", microseconds(begin_ns)},
           {"dur", microseconds(end_ns - begin_ns)},
           {"args", std::move(args)}});
  }

  // Readers bind an arrow's end to the last slice before it in the file.
  void write_arrow_end(const char* phase, int64_t pid, int64_t tid, int64_t time_ns, int64_t arrow) {
    Json end{{"ph", phase}, {"pid", pid}, {"tid", tid}, {"name", "signal"}, {"cat", "signal"}};
    end["id"] = arrow;
    end["ts"] = microseconds(time_ns);
    if (*phase == 'f') end["bp"] = "e";
    event(end);
  }

  const Timeline& timeline_;
  const std::vector<Track> tracks_;
  const ArrowEnds ends_;
  Output out_;
  bool first_ = true;
};

}  // namespace

void write_chrome_json(const Timeline& timeline, const Sink& sink) { Writer(timeline, sink).write(); }

}  // namespace moe_a2a::trace_export
