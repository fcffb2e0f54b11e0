#include "bindings/trace_export.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "trace_export/timeline.h"

namespace moe_a2a::bindings {
namespace {

namespace py = pybind11;
using trace_export::Arrow, trace_export::CounterSample, trace_export::Sink, trace_export::Slice, trace_export::Timeline;

template <class T>
using Array = py::array_t<T, py::array::c_style>;

template <class T>
std::span<const T> span_of(const Array<T>& array) {
  return {array.data(), static_cast<size_t>(array.size())};
}

void check_ends(const Timeline& timeline) {
  const int64_t num_slices = static_cast<int64_t>(timeline.slices.size());
  for (const Arrow& arrow : timeline.arrows) {
    if (std::min(arrow.source, arrow.sink) < 0 || std::max(arrow.source, arrow.sink) >= num_slices) {
      throw py::value_error("an arrow from slice " + std::to_string(arrow.source) + " to " +
                            std::to_string(arrow.sink) + "; there are " + std::to_string(num_slices) + " slices");
    }
  }
}

// `write` takes bytes: the method of an open file, compressed or not.
template <void (*kExport)(const Timeline&, const Sink&)>
void export_to(const py::function& write, const Array<Slice>& slices, const Array<Arrow>& arrows,
               const Array<CounterSample>& samples, std::vector<std::string> slice_names,
               std::vector<std::string> counter_names, std::string about) {
  const Timeline timeline{.slices = span_of(slices),
                          .arrows = span_of(arrows),
                          .samples = span_of(samples),
                          .slice_names = std::move(slice_names),
                          .counter_names = std::move(counter_names),
                          .about = std::move(about)};
  check_ends(timeline);
  kExport(timeline, [&](std::string_view piece) { write(py::bytes(piece.data(), piece.size())); });
}

}  // namespace

void bind_trace_export(py::module_& m) {
  PYBIND11_NUMPY_DTYPE(Slice, begin_ns, end_ns, bytes, rank, block, warp, name, peer, token, polls, expert, rows,
                       instant);
  PYBIND11_NUMPY_DTYPE(Arrow, source, sink);
  PYBIND11_NUMPY_DTYPE(CounterSample, time_ns, value, rank, name);
  m.def("write_chrome_json", &export_to<trace_export::write_chrome_json>);
#if defined(MOE_A2A_WITH_PERFETTO)  // if CMake found protozero
  m.def("write_perfetto", &export_to<trace_export::write_perfetto>);
#endif
}

}  // namespace moe_a2a::bindings
