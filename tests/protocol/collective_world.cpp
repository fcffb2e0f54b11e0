#include "collective_world.h"

namespace moe_a2a {

CollectiveWorld::CollectiveWorld(const CollectiveCase& shape) {
  for (const ModelCall& call : shape.calls) num_clock_jumps_ |= call.late_rank >= 0;
  const RegionSize size = CollectiveRank::size_of(shape.num_ranks);
  constexpr size_t kReportBytes = (sizeof(Report) + 127) / 128 * 128;
  const size_t ranks = shape.num_ranks;
  nbytes_ = ranks * (size.symmetric_bytes + size.local_bytes + kReportBytes);
  storage_.resize((nbytes_ + 128) / sizeof(std::max_align_t));
  memory_ = MemoryMap::first_line(storage_.data());
  map_ = MemoryMap(memory_, nbytes_);
  std::byte* local = memory_ + ranks * size.symmetric_bytes;
  std::byte* reports = local + ranks * size.local_bytes;
  for (size_t r = 0; r < ranks; ++r) {
    auto* report = reinterpret_cast<Report*>(reports + r * kReportBytes);
    ranks_.push_back(std::make_unique<CollectiveRank>(shape, r, memory_, local + r * size.local_bytes, report));
    name_regions(*ranks_.back());
  }
  map_.complete();
  for (const auto& rank : ranks_) {
    map_.mark(&rank->report()->is_complete, Field::kReportState);
    for (auto& has_failed : rank->region().state(0).has_failed) map_.mark(&has_failed, Field::kFailedCall);
  }
}

std::vector<Program> CollectiveWorld::programs() const {
  std::vector<Program> programs;
  for (const auto& rank : ranks_) programs.push_back(rank->program());
  return programs;
}

void CollectiveWorld::reset() {
  for (const auto& rank : ranks_) rank->reset();
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
  region(rank.report(), "report");
}

}  // namespace moe_a2a
