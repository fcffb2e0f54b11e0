// combine_send with a line codec: a separate kernel, so that uncoded sums keep their registers. Sums that return as
// LL words are not coded.
#pragma once

#include <algorithm>

#include "moe/combine/coded_sums.h"
#include "moe/combine/combine_send.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

struct CodedCombineSend {
  using Args = CodedCombineSendArgs;
  static constexpr const char* kName = "combine_send";

  static size_t shared_bytes(const Args& args) {
    return std::max(size_t(plan(args).bytes), CombineSend::shared_bytes(args));
  }

  MOE_A2A_DEVICE static void run(const Args& args, const Grid& grid, const Block& block, std::byte* shared) {
    with_wire(args.context.region.sums_return_ll(args.buffer),
              [&](auto wire) MOE_A2A_INLINED { send(wire, args, OwnSums(), grid, block, shared); });
  }

  MOE_A2A_DEVICE static void send(std::type_identity<LlWire> type, const Args& args, const OwnSums& own,
                                  const Grid& grid, const Block& block, std::byte* shared) {
    CombineSend::send(type, args, own, grid, block, shared);
  }
  MOE_A2A_DEVICE static void send(std::type_identity<RowWire>, const Args& args, const OwnSums& own, const Grid& grid,
                                  const Block& block, std::byte* shared) {
    const Context& c = args.context;
    const uint64_t epoch = c.region.epoch(args.buffer);
    const Exchange exchange = combine_rows(c, args.buffer, epoch);
    const RowWire::Plan plan = CodedCombineSend::plan(args);
    const RowWire wire(exchange, CombineSend::layout(args), grid, block, shared, plan,
                       c.region.tickets.at(args.buffer, MoeRegion::kCombineQueue));
    const CombineSchedule<RowWire> schedule(c, args.buffer, own);
    with_source(args, [&](const auto& source) { wire.send(schedule, source); });
    CombineSend::finish(args, grid, block, epoch);
  }

 private:
  // A lane loads kLaneElements values and a codec's thread encodes kLineValues: streaming needs them to be equal, so
  // float32 is not streamed. See with_source().
  MOE_A2A_HOST_DEVICE static bool streams(const Args& args) {
    const MoeConfig& config = args.context.config;
    return config.dtype != DType::kFloat32 &&
           can_stream(args.presummed ? 1 : config.num_topk, args.vector_rows, config.row_bytes(config.dtype));
  }
  MOE_A2A_HOST_DEVICE static RowWire::Plan plan(const Args& args) {
    return RowWire::plan(CombineSend::layout(args), streams(args) ? StagedFor::kStreaming : StagedFor::kSumming,
                         args.context.max_shared_bytes);
  }

  template <class F>
  MOE_A2A_DEVICE static void with_source(const Args& args, const F& f) {
    with_element_type(args.context.config.dtype, [&](auto type) {
      using T = decltype(type);
      if constexpr (kHasStreams && kLaneElements<T> == kLineValues) {
        if (streams(args)) return f(StreamedCodedSums<T>{{args}});
      }
      f(CodedLandedSums<T>{{args}});
    });
  }
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
