#include "bindings/trace_records.h"

#include <cstring>

#include "moe/vocabulary.h"

namespace moe_a2a::bindings {
namespace {

template <class T>
at::Tensor to_tensor(const std::vector<T>& values, at::IntArrayRef shape) {
  const at::Tensor tensor = at::empty(shape, at::kLong);
  if (!values.empty()) std::memcpy(tensor.mutable_data_ptr(), values.data(), values.size() * sizeof(T));
  return tensor;
}

}  // namespace

py::dict read_trace(ExpertParallel& ep) {
  TraceDump dump;
  {
    py::gil_scoped_release unlocked;
    const auto turn = ep.enter();
    dump = ep.tracer().read();
  }
  const auto num_segments = static_cast<int64_t>(dump.segment_written.size());
  py::dict read;
  read["records"] = to_tensor(dump.records, {static_cast<int64_t>(dump.records.size()), 2});
  read["segment_written"] = to_tensor(dump.segment_written, {num_segments});
  read["segment_dropped"] = to_tensor(dump.segment_dropped, {num_segments});
  read["warps_per_block"] = ep.device().warps_per_block();
  read["ticks_per_second"] = ep.device().clock_ticks_per_second();
  read["clock_step_ticks"] = ep.tracer().clock_step();
  return read;
}

std::vector<std::array<int64_t, 3>> align_clocks(ExpertParallel& ep, int num_rounds, void* stream) {
  py::gil_scoped_release unlocked;
  const auto turn = ep.enter();
  ep.check();
  const std::vector<ClockReading> readings = ep.tracer().align_clocks(num_rounds, stream);
  ep.check();
  std::vector<std::array<int64_t, 3>> numbers;
  for (const ClockReading& reading : readings) {
    numbers.push_back({reading.offset, static_cast<int64_t>(reading.round_trip), static_cast<int64_t>(reading.at)});
  }
  return numbers;
}

// Codes of all vocabularies as indices; no name where none has the code.
std::vector<std::string> trace_kinds() {
  std::vector<std::string> names;
  for (const Vocabulary* words : {&kCommVocabulary, &kMoeVocabulary}) {
    names.resize(static_cast<size_t>(words->first_kind));
    for (const SliceName& kind : words->kinds) names.emplace_back(kind.name);
  }
  return names;
}
std::vector<std::string> trace_operations() {
  std::vector<std::string> names;
  for (const Vocabulary* words : {&kCommVocabulary, &kMoeVocabulary}) {
    names.resize(static_cast<size_t>(words->first_operation));
    names.insert(names.end(), words->operations.begin(), words->operations.end());
  }
  return names;
}

}  // namespace moe_a2a::bindings
