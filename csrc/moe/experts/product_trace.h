// The trace of an ExpertParallel's products. They may run concurrently with its dispatches and combines, on another
// stream, so they have separate segments.
#pragma once

#include "comm/tracer.h"
#include "moe/experts/run_grouped_gemm.h"

namespace moe_a2a {

class ProductTrace {
 public:
  explicit ProductTrace(Device& device) : device_(device), tracer_(device, shown_) {}
  ProductTrace(const ProductTrace&) = delete;
  ProductTrace& operator=(const ProductTrace&) = delete;

  Tracer& tracer() { return tracer_; }
  // Calls run_grouped_gemm(), recorded while the trace is on. Recorded products are serialised, whatever their streams,
  // since each continues the segments of the previous one. The caller holds a turn of the client.
  void run(const GroupedGemmPlace& place, GroupedGemmArgs args);

 private:
  Device& device_;
  TraceBuffer shown_;
  Tracer tracer_;
  LaunchOrder order_;
};

}  // namespace moe_a2a
