#include "bindings/trace_records.h"

#include <cstring>

#include "collectives/vocabulary.h"
#include "moe/vocabulary.h"

namespace moe_a2a::bindings {
namespace {

template <class T>
at::Tensor to_tensor(const std::vector<T>& values, at::IntArrayRef shape) {
  const at::Tensor tensor = at::empty(shape, at::kLong);
  if (!values.empty()) std::memcpy(tensor.mutable_data_ptr(), values.data(), values.size() * sizeof(T));
  return tensor;
}

template <class T>
void append(std::vector<T>& values, const std::vector<T>& more) {
  values.insert(values.end(), more.begin(), more.end());
}
void append(TraceDump& dump, const TraceDump& more) {
  append(dump.records, more.records);
  append(dump.segment_written, more.segment_written);
  append(dump.segment_dropped, more.segment_dropped);
}

}  // namespace

void start_trace(Client& client, int64_t records) {
  py::gil_scoped_release unlocked;
  const auto turn = client.enter();
  for (Tracer* tracer : client.tracers()) tracer->start(records);
}

void stop_trace(Client& client) {
  py::gil_scoped_release unlocked;
  const auto turn = client.enter();
  for (Tracer* tracer : client.tracers()) tracer->stop();
}

py::dict read_trace(Client& client, const Communicator& comm) {
  TraceDump dump;
  {
    py::gil_scoped_release unlocked;
    const auto turn = client.enter();
    for (Tracer* tracer : client.tracers()) append(dump, tracer->read());
  }
  const auto num_segments = static_cast<int64_t>(dump.segment_written.size());
  py::dict read;
  read["records"] = to_tensor(dump.records, {static_cast<int64_t>(dump.records.size()), 2});
  read["segment_written"] = to_tensor(dump.segment_written, {num_segments});
  read["segment_dropped"] = to_tensor(dump.segment_dropped, {num_segments});
  read["warps_per_block"] = client.device().warps_per_block();
  read["ticks_per_second"] = client.device().clock_ticks_per_second();
  read["clock_step_ticks"] = comm.clock_step();
  return read;
}

// Names indexed by code, over all vocabularies; empty where no vocabulary has the code.
std::vector<std::string> trace_kinds() {
  std::vector<std::string> names;
  for (const Vocabulary* words : {&kCommVocabulary, &kMoeVocabulary, &kCollectiveVocabulary}) {
    names.resize(static_cast<size_t>(words->first_kind));
    for (const SliceName& kind : words->kinds) names.emplace_back(kind.name);
  }
  return names;
}
std::vector<std::string> trace_operations() {
  std::vector<std::string> names;
  for (const Vocabulary* words : {&kCommVocabulary, &kMoeVocabulary, &kCollectiveVocabulary}) {
    names.resize(static_cast<size_t>(words->first_operation));
    names.insert(names.end(), words->operations.begin(), words->operations.end());
  }
  return names;
}

}  // namespace moe_a2a::bindings
