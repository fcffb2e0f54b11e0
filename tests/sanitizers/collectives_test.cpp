// The second client of a communicator: its sums, its words in reports and traces, and its life beside other clients.
#include "collectives/collectives.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "collectives/vocabulary.h"
#include "seed.h"
#include "thread_ranks.h"
#include "traffic.h"

namespace moe_a2a {
namespace {

// Small integers: exact in bfloat16, and so is the sum over eight ranks.
float value_of(int rank, int call, int64_t i) { return static_cast<float>((rank * 5 + call * 3 + i * 7) % 31 - 15); }

struct Call {
  int64_t count;
  DType dtype;
  bool in_place;
};

std::vector<Call> draw_calls(uint64_t seed, int num_calls) {
  std::mt19937_64 random(seed);
  std::vector<Call> calls(num_calls);
  for (Call& call : calls) {
    call.dtype = random() % 2 ? DType::kFloat32 : DType::kBfloat16;
    const int64_t most = Collectives::max_nbytes() / size_of(call.dtype);
    const int64_t limits[] = {1, 3, 200, 20000, most};
    const int64_t limit = limits[random() % 5];
    call.count = random() % 8 == 0 ? limit : static_cast<int64_t>(random() % (limit + 1));
    call.in_place = random() % 2;
  }
  return calls;
}

void check_call(Collectives& collectives, const Call& call, int number) {
  const int rank = collectives.member().rank, num_ranks = collectives.member().num_ranks;
  const size_t nbytes = call.count * size_of(call.dtype);
  std::vector<std::byte> x(nbytes + 16), out(nbytes + 16, std::byte{0xa5});
  for (int64_t i = 0; i < call.count; ++i) store_element(x.data(), call.dtype, i, value_of(rank, number, i));
  std::byte* result = call.in_place ? x.data() : out.data();
  collectives.all_reduce(x.data(), result, call.count, call.dtype, nullptr);
  for (int64_t i = 0; i < call.count; ++i) {
    float expected = 0;
    for (int r = 0; r < num_ranks; ++r) expected += value_of(r, number, i);
    ASSERT_EQ(load_element(result, call.dtype, i), expected) << "call " << number << ", element " << i;
  }
  for (size_t i = nbytes; i < nbytes + 16; ++i) ASSERT_EQ(out[i], std::byte{0xa5}) << "behind the end";
}

TEST(OneShot, AddsUpWhateverTheSizesAreFromCallToCall) {
  const uint64_t seed = test_seed();
  for (const int num_ranks : {1, 2, 3, 5, 8}) {
    const std::vector<Call> calls = draw_calls(seed + num_ranks, 40 / num_ranks + 5);
    run_communicators(num_ranks, 60, [&](const std::shared_ptr<Communicator>& comm, Meeting& meeting) {
      Collectives collectives(comm);
      meeting.connect(collectives);
      for (size_t i = 0; i < calls.size(); ++i) check_call(collectives, calls[i], static_cast<int>(i));
      collectives.close();
    });
  }
}

TEST(OneShot, AnAbsentRankIsATimeoutInItsOwnWords) {
  run_communicators(3, 0.3, [&](const std::shared_ptr<Communicator>& comm, Meeting& meeting) {
    Collectives collectives(comm);
    meeting.connect(collectives);
    if (comm->member().rank != 1) {
      try {
        check_call(collectives, {100, DType::kFloat32, false}, 0);
        ADD_FAILURE() << "rank " << comm->member().rank << " did not notice";
      } catch (const PeerTimeout& timeout) {
        EXPECT_STREQ(timeout.operation, "one_shot_all_reduce");
        EXPECT_STREQ(timeout.awaited, "chunk");
        EXPECT_EQ(timeout.report.reason == Reason::kPoisoned ? timeout.report.culprit : timeout.report.peer, 1);
        EXPECT_NE(std::string(timeout.what()).find("for the chunk from rank"), std::string::npos) << timeout.what();
      }
    }
    meeting.wait();
  });
}

TEST(OneShot, TracesItsOwnSlices) {
  run_communicators(2, 60, [&](const std::shared_ptr<Communicator>& comm, Meeting& meeting) {
    Collectives collectives(comm);
    meeting.connect(collectives);
    collectives.tracer().start(1000);
    check_call(collectives, {10000, DType::kFloat32, false}, 0);  // 40,000 bytes: three chunks
    collectives.tracer().stop();
    const TraceDump dump = collectives.tracer().read();
    const auto count = [&](TraceKind kind) {
      return std::count_if(dump.records.begin(), dump.records.end(), [&](const TraceRecord& record) {
        return (record.word[1] >> TraceRecord::kKindAt & 31) == static_cast<uint64_t>(kind);
      });
    };
    EXPECT_EQ(count(collective_kind::kPush), 3);
    EXPECT_EQ(count(TraceKind::kReduce), 3);
    EXPECT_EQ(count(TraceKind::kKernel), 1 * collectives.device().warps_per_block() *
                                             std::min(3, std::max(1, collectives.device().default_blocks())));
    collectives.close();
  });
}

// Several clients on one communicator, made and closed in any order; each goes on while another is closed.
TEST(Clients, LiveAndEndIndependently) {
  const MoeConfig config{.num_ranks = 3, .num_experts = 3, .num_topk = 1, .hidden = 8, .num_max_tokens_per_rank = 4};
  run_communicators(3, 60, [&](const std::shared_ptr<Communicator>& comm, Meeting& meeting) {
    MoeConfig own = config;
    own.rank = comm->member().rank;
    auto ep = std::make_unique<ExpertParallel>(comm, own);
    auto first = std::make_unique<Collectives>(comm);
    auto second = std::make_unique<Collectives>(comm);
    for (Client* client : {static_cast<Client*>(first.get()), static_cast<Client*>(ep.get())}) meeting.connect(*client);
    meeting.connect(*second);
    check_call(*first, {100, DType::kFloat32, false}, 0);
    check_call(*second, {70, DType::kBfloat16, true}, 1);
    first->close();
    first.reset();
    EXPECT_THROW(
        {
          Collectives unconnected(comm);
          unconnected.all_reduce(nullptr, nullptr, 0, DType::kFloat32, nullptr);
        },
        std::runtime_error);
    check_call(*second, {5000, DType::kFloat32, true}, 2);
    auto third = std::make_unique<Collectives>(comm);
    meeting.connect(*third);
    check_call(*third, {1, DType::kFloat32, true}, 3);
    check_call(*second, {0, DType::kFloat32, true}, 4);
    ep->close();
    check_call(*third, {9, DType::kBfloat16, false}, 5);
    second->close();
    third->close();
  });
}

}  // namespace
}  // namespace moe_a2a
