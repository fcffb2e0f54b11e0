// What a kernel gets besides its own arguments.
#pragma once

#include "comm/comm_region.h"
#include "comm/heap_view.h"
#include "comm/wait.h"

namespace moe_a2a {

// Common to all clients: peer memory, deadline, report. A client adds its sizes and its region.
struct ClientContext {
  HeapView heap;  // the client's region on every rank
  WaitPolicy wait;
  ClientServices services;
  int max_shared_bytes = 0;  // per block

  // Where kernels and waits append their records.
  MOE_A2A_HOST_DEVICE const TraceBuffer& trace() const { return wait.trace; }
};

// For the communicator's own kernels.
struct CommContext : ClientContext {
  CommRegion region;
};

// Lays out a region from its two bases: the services that every region has, then the client's fields by
// lay_out(symmetric, local). Points the context at it. With null bases only the returned size is valid.
template <class LayOut>
RegionSize place_client(ClientContext& context, int num_ranks, int num_slots, std::byte* symmetric_base,
                        std::byte* local_base, const LayOut& lay_out) {
  RegionLayout symmetric(symmetric_base), local(local_base);
  context.services = ClientServices::take_from(symmetric, local, num_ranks, num_slots);
  context.wait.num_reports = context.services.num_reports.data;
  context.wait.refusal_text = context.services.refusal_text.data;
  lay_out(symmetric, local);
  return {symmetric.size(), local.size(), symmetric.digest()};
}

inline RegionSize place_region(CommContext& context, int num_ranks, std::byte* symmetric_base, std::byte* local_base) {
  return place_client(context, num_ranks, 1, symmetric_base, local_base, [&](auto& symmetric, auto& local) {
    context.region = CommRegion::take_from(symmetric, local, num_ranks);
  });
}

}  // namespace moe_a2a
