// The Python module moe_a2a._core. A binding does three things: check, convert, call.
#include "bindings/clients.h"
#include "bindings/collectives.h"
#include "bindings/config.h"
#include "bindings/errors.h"
#include "bindings/expert_parallel.h"
#include "bindings/expert_weights.h"
#include "bindings/grouped_gemm.h"
#include "bindings/signals.h"
#include "bindings/topk_layout.h"
#include "bindings/trace_export.h"
#include "bindings/trace_records.h"

namespace moe_a2a::bindings {

PYBIND11_MODULE(_core, m) {
  m.doc() = "The compiled core of moe_a2a; use the classes of the package instead.";
  bind_grouped_gemm(m);
  bind_topk_layout(m);
  m.def("built_targets", &built_targets, "Names of the targets in this build: \"cpu\", \"cuda\", \"hip\".");
  bind_config(m);
  translate_errors();
  watch_signals();
  switch_devices_like_pytorch();
  bind_trace_export(m);
  m.def("trace_kinds", &trace_kinds);
  m.def("trace_operations", &trace_operations);
  bind_communicator(m);
  bind_collectives(m);
  bind_expert_parallel(m);
  bind_expert_weights(m);
}

}  // namespace moe_a2a::bindings
