// Compiled with -fsanitize=thread, so that the explorer sees its reads.
#include "explored_rank.h"

#include <cstring>
#include <utility>

namespace moe_a2a {

RegionSize ExploredRank::connect(int rank, int num_ranks, std::byte* symmetric) {
  own_heap_ = symmetric + rank * size_.symmetric_bytes;
  comm_.heap = {.rank = rank, .num_ranks = num_ranks};
  for (int r = 0; r < num_ranks; ++r) comm_.heap.base[r] = symmetric + r * size_.symmetric_bytes;
  client_.heap = comm_.heap;  // in this model both regions are in one allocation
  const RegionSize size = place_region(comm_, num_ranks, own_heap_, local_);
  for (ClientContext* context : {static_cast<ClientContext*>(&comm_), &client_}) {
    context->max_shared_bytes = 1 << 20;
    // When the clock jumps, only rank 0 times out; the others leave because it tells them.
    context->wait.timeout_ticks = uint64_t{1} << (rank == 0 ? 30 : 60);
    context->wait.reports = reports_;
    context->wait.poison = comm_.region.poison.data;
    context->wait.comm_heap = &comm_.heap;
  }
  return size;
}

void ExploredRank::clear() {
  std::memset(own_heap_, 0, size_.symmetric_bytes);
  std::memset(local_, 0, size_.local_bytes);
  *reports_ = Reports{};
}

Launch ExploredRank::launch(const std::string& name, int call, int num_blocks, std::function<void(int)> body) const {
  const std::string who = "rank " + std::to_string(rank()) + (call < 0 ? "" : " call " + std::to_string(call));
  return {who, name, num_blocks, std::move(body)};
}

Launch ExploredRank::be_late() {
  return launch("be_late", -1, 1, [this](int) {
    while (poison_of(client_.wait) == 0) pause();
  });
}

RefusalText ExploredRank::refusal_text(int rank) {
  RefusalText text;
  for (int i = 0; i < kRefusalWords; ++i)
    text.word[i] = static_cast<uint64_t>(rank + 1) << 32 | static_cast<uint64_t>(i);
  return text;
}

void ExploredRank::compare_refusal(int peer, bool check_text) const {
  const Report& report = reports_->refusal;
  if (atomic_load<Order::kAcquire, Scope::kSystem>(&report.is_complete) != 1u) fail("no report of a refusal");
  if (report.reason != Reason::kRefused || report.peer != peer) fail("the report is not of that refusal");
  const RefusalText expected = refusal_text(peer);
  for (int i = 0; check_text && i < kRefusalWords; ++i) {
    if (report.refusal.word[i] != expected.word[i]) fail("the text of the refusal is wrong");
  }
}

void ExploredRank::compare_left(int culprit) const {
  const Report& report = reports_->failure;
  if (atomic_load<Order::kAcquire, Scope::kSystem>(&report.is_complete) != 1u) fail("no report of the missing rank");
  if (report.reason != Reason::kTimeout && report.reason != Reason::kPoisoned) fail("the reason is wrong");
  if (report.culprit != culprit) fail("the report blames rank " + std::to_string(report.culprit));
}

void ExploredRank::take_refusal_report() {
  reports_->refusal.is_complete = 0;
  ++reports_->refusal.num_noticed;
}

}  // namespace moe_a2a
