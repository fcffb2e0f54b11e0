#include "collective_world.h"

namespace moe_a2a {

CollectiveWorld::CollectiveWorld(const CollectiveCase& shape)
    : ModelStage(shape, shape.num_ranks, CollectiveRank::size_of(shape.num_ranks)) {
  for (const ModelCall& call : shape.calls) num_clock_jumps_ |= call.late_rank >= 0;
  for (const auto& rank : ranks_) name_regions(*rank);
  map_.complete();
  for (const auto& rank : ranks_) {
    map_.mark(&rank->reports()->failure.is_complete, Field::kReportState);
    map_.mark(&rank->reports()->refusal.is_complete, Field::kReportState);
    for (auto& has_failed : rank->region().state(0).has_failed) map_.mark(&has_failed, Field::kFailedCall);
  }
}

std::vector<Program> CollectiveWorld::programs() const {
  std::vector<Program> programs;
  for (const auto& rank : ranks_) programs.push_back(rank->program());
  return programs;
}

void CollectiveWorld::name_regions(const CollectiveRank& rank) {
  const std::string owner = " of rank " + std::to_string(rank.rank());
  const auto region = [&](const void* begin, const char* name, Field field = Field::kOther) {
    map_.add(begin, name + owner, field);
  };
  const CommRegion& comm = rank.comm_region();
  region(comm.clock_meeting.data, "the communicator's region");
  region(comm.poison.data, "poison", Field::kPoison);
  region(rank.services().goodbye.data, "goodbye", Field::kGoodbye);
  region(rank.services().refusal_text.data, "refusal_text", Field::kRefusalText);
  region(rank.region().call_signal.data, "call_signal", Field::kCallSignal);
  region(rank.region().announcement.data, "announcement", Field::kAnnouncement);
  region(rank.region().chunk_signal.data, "chunk_signal", Field::kChunkSignal);
  region(rank.region().result_signal.data, "result_signal", Field::kResultSignal);
  region(rank.region().landing.data, "landing");
  region(rank.region().words.data, "words", Field::kWords);
  region(rank.region().result.data, "result");
  region(rank.x(), "x");
  region(rank.out(), "out");
  region(comm.clock_epoch.data, "the communicator's local memory");
  region(rank.services().num_reports.data, "num_reports");
  region(rank.region().state.data, "state", Field::kProgress);
  region(rank.region().other_call.data, "other_call");
  region(rank.reports(), "reports");
}

}  // namespace moe_a2a
