#include "world.h"

namespace moe_a2a {

World::World(const Scenario& scenario)
    : ModelStage(scenario.shape, scenario.shape.num_ranks, size_of(scenario.shape)),
      scenario_(scenario),
      symmetric_bytes_(size_of(scenario.shape).symmetric_bytes) {
  for (const auto& rank : ranks_) name_regions(*rank);
  mark_fields();
}

std::vector<Program> World::programs() const {
  std::vector<Program> programs;
  for (const auto& rank : ranks_) programs.push_back(scenario_.program(*rank));
  for (const auto& rank : ranks_) {
    Program host = scenario_.host ? scenario_.host(*rank) : Program{};
    if (!host.empty()) programs.push_back(std::move(host));
  }
  return programs;
}

// ---- names

void World::name_regions(const ModelRank& rank) {
  const MoeRegion& region = rank.region();
  const CommRegion& comm = rank.comm_region();
  const std::string owner = " of rank " + std::to_string(rank.rank());
  const auto field = [&](const void* begin, const char* name, Field kind = Field::kOther) {
    map_.add(begin, name + owner, kind);
  };
  field(region.table_signal.data, "table_signal", Field::kTableSignal);
  field(region.table_route.data, "table_route");
  field(region.table_weight.data, "table_weight");
  field(region.table_landed_idx.data, "table_landed_idx");
  field(region.table_count.data, "table_count");
  field(region.row_signal.data, "row_signal", Field::kRowSignal);
  field(region.row.data, "row");
  field(region.combine_signal.data, "combine_signal", Field::kCombineSignal);
  field(region.combine_row.data, "combine_row");
  if (scenario_.shape.num_max_ll_tokens > 0) {  // otherwise they are empty, at the address of the next field
    field(region.ll_choices.data, "ll_choices", Field::kLlChoices);
    field(region.ll_row.data, "ll_row", Field::kLlRow);
    field(region.ll_combine_row.data, "ll_combine_row", Field::kLlCombineRow);
  }
  field(region.dispatch_credit.data, "dispatch_credit", Field::kDispatchCredit);
  field(region.combine_refusal.data, "combine_refusal", Field::kCombineRefusal);
  field(region.dispatch_refusal.data, "dispatch_refusal");
  field(rank.services().refusal_text.data, "refusal_text", Field::kRefusalText);
  field(rank.services().goodbye.data, "goodbye", Field::kGoodbye);
  field(comm.clock_meeting.data, "clock_meeting", Field::kClockMeeting);
  field(comm.clock_message.data, "clock_message", Field::kClockMessage);
  field(comm.clock_log.data, "clock_log");
  field(comm.poison.data, "poison", Field::kPoison);
  field(region.epoch.data, "epoch");
  field(comm.clock_epoch.data, "clock_epoch");
  field(comm.clock_reading.data, "clock_reading");
  field(comm.heap.data, "the communicator's heap view");
  field(region.has_given_up.data, "has_given_up", Field::kHasGivenUp);
  field(region.errors.data, "errors");
  field(rank.services().num_reports.data, "num_reports");
  field(region.arrivals.data, "arrivals");
  field(region.tickets.data, "tickets");
  field(region.expert_offsets.data, "expert_offsets");
  field(region.expert_counts.data, "expert_counts");
  field(region.expert_row_index.data, "expert_row_index");
  field(region.route_weights.data, "route_weights");
  field(region.route_src_rank.data, "route_src_rank");
  field(region.route_src_token_idx.data, "route_src_token_idx");
  field(region.landed_row.data, "landed_row");
  field(region.landed_offsets.data, "landed_offsets");
  field(region.landed_term.data, "landed_term");
  field(region.combine_order.data, "combine_order");
  field(region.num_recv_tokens_per_rank.data, "num_recv_tokens_per_rank");
  field(region.sums_return_ll.data, "sums_return_ll");
  field(region.token_ranks.data, "token_ranks");
  field(rank.y(), "y");
  field(rank.stored_tiles(), "stored_tiles", Field::kStoredTiles);
  field(rank.reports(), "reports");
}

void World::mark_fields() {
  map_.complete();
  for (const auto& rank : ranks_) {
    for (int b = 0; b < scenario_.shape.num_buffers; ++b) {
      map_.mark(rank->region().arrivals.at(b, MoeRegion::kDispatchSend), Field::kSendArrivals);
      map_.mark(rank->region().arrivals.at(b, MoeRegion::kCombineSend), Field::kCombineArrivals);
    }
    map_.mark(&rank->reports()->failure.is_complete, Field::kReportState);
    map_.mark(&rank->reports()->refusal.is_complete, Field::kReportState);
  }
}

bool World::sends_to(int rank, int peer) const {
  const int experts_per_rank = scenario_.shape.num_experts / scenario_.shape.num_ranks;
  for (int call = 0; call < scenario_.shape.num_calls; ++call) {
    for (const auto& choices : scenario_.shape.routing(rank, call)) {
      for (const int32_t expert : choices) {
        if (expert >= 0 && expert / experts_per_rank == peer) return true;
      }
    }
  }
  return false;
}

// A credit in the heap of `owner`, returned by `src`; used if owner sends src tokens.
bool World::is_unused_pair(const void* address) const {
  const int owner = static_cast<int>(offset_of(address) / symmetric_bytes_);
  const auto* credits = ranks_[owner]->region().dispatch_credit.data;
  const int src = static_cast<int>((static_cast<const Signal*>(address) - credits) % scenario_.shape.num_ranks);
  return !sends_to(owner, src);
}

}  // namespace moe_a2a
