#include "collectives/collectives.h"

#include <algorithm>

#include "collectives/collective_kernels.h"
#include "collectives/one_shot.h"

namespace moe_a2a {

Collectives::Collectives(std::shared_ptr<Communicator> comm)
    : Client(comm->member(), kCollectiveVocabulary, context_), comm_(std::move(comm)) {
  device_->add(collective_kernels(member_.target));
  const int num_ranks = member_.num_ranks;
  allocate(place_region(context_, num_ranks, nullptr, nullptr), {},
           [&](std::byte* symmetric, std::byte* local) { place_region(context_, num_ranks, symmetric, local); });
  link(comm_->poison_link());
}

void Collectives::all_reduce(const std::byte* x, std::byte* out, int64_t count, DType dtype, void* stream) {
  const CallGate::Turn turn = gate_.enter();
  require_open();
  raise_waits();
  const int64_t num_chunks = (count * size_of(dtype) + kCollectiveChunk - 1) / kCollectiveChunk;
  const int num_blocks = static_cast<int>(
      std::clamp<int64_t>(num_chunks, 1, std::max(1, std::min(device_->default_blocks(), share_of_device()))));
  launch(OneShotArgs{.context = context_, .x = x, .out = out, .count = count, .dtype = dtype}, num_blocks, stream);
  if (device_->is_synchronous()) raise_waits();
}

}  // namespace moe_a2a
