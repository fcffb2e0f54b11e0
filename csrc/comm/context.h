// What a kernel is given beside its own arguments.
#pragma once

#include "comm/comm_region.h"
#include "comm/heap_view.h"
#include "comm/wait.h"

namespace moe_a2a {

// Of every client: the memory of its peers, the deadline, whom to tell. A client adds its sizes and its region.
struct ClientContext {
  HeapView heap;  // the client's region on every rank
  WaitPolicy wait;
  ClientServices services;
  int max_shared_bytes = 0;  // that a block may use

  // Where the kernels leave their records; waits leave theirs there too.
  MOE_A2A_HOST_DEVICE const TraceBuffer& trace() const { return wait.trace; }
};

// Of the communicator's own kernels.
struct CommContext : ClientContext {
  CommRegion region;
};

}  // namespace moe_a2a
