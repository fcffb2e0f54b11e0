// The second client of a communicator: its sums, its names in reports and traces, and its lifetime beside other
// clients.
#include "collectives/collectives.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "collectives/vocabulary.h"
#include "seed.h"
#include "thread_ranks.h"
#include "trace_records.h"
#include "traffic.h"

namespace moe_a2a {
namespace {

// Small integers: exact in bfloat16, and so is the sum over eight ranks.
float value_of(int rank, int call, int64_t i) { return static_cast<float>((rank * 5 + call * 3 + i * 7) % 31 - 15); }

enum class Kind { kOneShot, kTwoShot, kReduceScatter, kAllGather, kQ8, kQ6, kRing, kDoubling, kWords, kDirect };

struct Call {
  int64_t count;  // of the tensor; of reduce_scatter and all_gather, of the largest share
  DType dtype;
  bool in_place;
  Kind kind = Kind::kOneShot;
  ReduceOp op = ReduceOp::kSum;
  bool symmetric = false;
};

constexpr int64_t kWorkspace = 64 << 10;
constexpr int64_t kRoom = 1 << 20;  // bytes of the largest tensor

std::vector<Call> draw_calls(uint64_t seed, int num_calls) {
  std::mt19937_64 random(seed);
  std::vector<Call> calls(num_calls);
  for (Call& call : calls) {
    constexpr DType kTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBfloat16};
    call.dtype = kTypes[random() % 3];
    const int64_t limits[] = {1, 3, 200, 5000, 50000};
    const int64_t limit = limits[random() % 5];
    call.count = random() % 8 == 0 ? limit : static_cast<int64_t>(random() % (limit + 1));
    call.in_place = random() % 2;
    call.kind = static_cast<Kind>(random() % 10);
    call.op = static_cast<ReduceOp>(random() % 3);
    const bool has_shares = call.kind == Kind::kReduceScatter || call.kind == Kind::kAllGather;
    call.symmetric = call.kind == Kind::kDirect || (has_shares && random() % 2);
  }
  return calls;
}

// Elements of each rank in a call of shares: all, a third, none, all, ...
std::vector<int64_t> counts_of(const Call& call, int num_ranks) {
  std::vector<int64_t> counts(num_ranks);
  for (int r = 0; r < num_ranks; ++r) counts[r] = r % 3 == 0 ? call.count : r % 3 == 1 ? call.count / 3 : 0;
  return counts;
}

float expected_value(const Call& call, int num_ranks, int number, int64_t i) {
  float expected = value_of(0, number, i);
  for (int r = 1; r < num_ranks; ++r) {
    const float value = value_of(r, number, i);
    expected = call.op == ReduceOp::kSum   ? expected + value
               : call.op == ReduceOp::kMax ? std::max(expected, value)
                                           : std::min(expected, value);
  }
  return expected;
}

// A tensor with guard bytes behind it, in `room` or in memory of its own.
class Tensor {
 public:
  Tensor(int64_t count, DType dtype, std::byte* room)
      : dtype_(dtype), nbytes_(count * size_of(dtype)), own_(room != nullptr ? 0 : nbytes_ + kMargin) {
    data_ = room != nullptr ? room : own_.data();
    std::fill_n(data_, nbytes_ + kMargin, kPoison);
  }

  std::byte* at(int64_t i) { return data_ + i * size_of(dtype_); }
  void set(int64_t i, float value) { store_element(data_, dtype_, static_cast<int>(i), value); }
  float get(int64_t i) const { return load_element(data_, dtype_, static_cast<int>(i)); }
  bool has_margin() const {
    return std::all_of(data_ + nbytes_, data_ + nbytes_ + kMargin, [](std::byte byte) { return byte == kPoison; });
  }

 private:
  static constexpr std::byte kPoison{0xa5};
  static constexpr int64_t kMargin = 16;
  DType dtype_;
  int64_t nbytes_;
  std::vector<std::byte> own_;
  std::byte* data_;
};

// Collectives with room for two tensors in symmetric memory.
struct Caller {
  explicit Caller(const std::shared_ptr<Communicator>& comm, int64_t workspace = kWorkspace)
      : collectives(comm, workspace, 2 * kRoom) {}

  void connect(Meeting& meeting) {
    meeting.connect(collectives);
    for (std::byte*& room : rooms) room = collectives.take_tensor(kRoom);
  }
  Tensor tensor(const Call& call, int64_t count, int i) const {
    return {count, call.dtype, call.symmetric ? rooms[i] : nullptr};
  }

  Collectives collectives;
  std::byte* rooms[2];
};

Collectives::Method method_of(const Call& call) {
  const LineCodec codec = call.kind == Kind::kQ8   ? LineCodec::kQ8
                          : call.kind == Kind::kQ6 ? LineCodec::kQ6
                                                   : LineCodec::kNone;
  const bool is_small = call.count * size_of(call.dtype) <= kMaxWordsBytes;
  const Algorithm algorithm = call.kind == Kind::kOneShot    ? Algorithm::kOneShot
                              : call.kind == Kind::kWords    ? Algorithm::kOneShot
                              : call.kind == Kind::kDirect   ? Algorithm::kDirect
                              : call.kind == Kind::kRing     ? Algorithm::kRing
                              : call.kind == Kind::kDoubling ? Algorithm::kRecursiveDoubling
                                                             : Algorithm::kTwoShot;
  return {.op = call.op,
          .algorithm = algorithm,
          .codec = codec,
          .wire = call.kind == Kind::kWords && is_small ? CollectiveWire::kWords : CollectiveWire::kRows};
}

// One step per rank's value, at most 15, and one for their sum, plus the rounding to the dtype.
float error_bound(const Call& call, int num_ranks) {
  const float range = call.kind == Kind::kQ8 ? 128 : call.kind == Kind::kQ6 ? 32 : 0;
  if (range == 0) return 0;
  return 1.02f * static_cast<float>(2 * num_ranks) * 15 / range + static_cast<float>(num_ranks) * 15 / 256;
}

void check_all_reduce(Caller& caller, const Call& call, int number) {
  Collectives& collectives = caller.collectives;
  const int rank = collectives.member().rank, num_ranks = collectives.member().num_ranks;
  Tensor x = caller.tensor(call, call.count, 0), out = caller.tensor(call, call.count, 1);
  for (int64_t i = 0; i < call.count; ++i) x.set(i, value_of(rank, number, i));
  Tensor& result = call.in_place ? x : out;
  collectives.all_reduce({x.at(0), result.at(0), call.dtype}, call.count, method_of(call), nullptr);
  for (int64_t i = 0; i < call.count; ++i) {
    ASSERT_NEAR(result.get(i), expected_value(call, num_ranks, number, i), error_bound(call, num_ranks))
        << "call " << number << ", element " << i;
  }
  ASSERT_TRUE(result.has_margin()) << "call " << number;
}

void check_shares(Caller& caller, const Call& call, int number) {
  Collectives& collectives = caller.collectives;
  const int rank = collectives.member().rank, num_ranks = collectives.member().num_ranks;
  const std::vector<int64_t> counts = counts_of(call, num_ranks);
  const Shares shares = Shares::of(counts);
  const int64_t total = shares.offset[num_ranks], own = shares.offset[rank];
  Tensor whole = caller.tensor(call, total, 0), share = caller.tensor(call, counts[rank], 1);
  std::byte* mine = call.in_place ? whole.at(own) : share.at(0);
  if (call.kind == Kind::kReduceScatter) {
    for (int64_t i = 0; i < total; ++i) whole.set(i, value_of(rank, number, i));
    collectives.reduce_scatter({whole.at(0), mine, call.dtype}, counts, call.op, 0, nullptr);
    for (int64_t i = 0; i < counts[rank]; ++i) {
      ASSERT_EQ(call.in_place ? whole.get(own + i) : share.get(i), expected_value(call, num_ranks, number, own + i))
          << "call " << number << ", element " << i;
    }
  } else {
    Tensor& x = call.in_place ? whole : share;
    for (int64_t i = 0; i < counts[rank]; ++i) x.set(call.in_place ? own + i : i, value_of(rank, number, own + i));
    collectives.all_gather({mine, whole.at(0), call.dtype}, counts, 0, nullptr);
    for (int r = 0; r < num_ranks; ++r) {
      for (int64_t i = shares.offset[r]; i < shares.offset[r + 1]; ++i) {
        ASSERT_EQ(whole.get(i), value_of(r, number, i)) << "call " << number << ", element " << i;
      }
    }
  }
  ASSERT_TRUE(whole.has_margin() && share.has_margin()) << "call " << number;
}

void check_call(Caller& caller, const Call& call, int number) {
  if (call.kind != Kind::kReduceScatter && call.kind != Kind::kAllGather) {
    check_all_reduce(caller, call, number);
  } else {
    check_shares(caller, call, number);
  }
}

TEST(Collective, IsRightWhateverChangesFromCallToCall) {
  const uint64_t seed = test_seed();
  for (const int num_ranks : {1, 2, 3, 5, 8}) {
    const std::vector<Call> calls = draw_calls(seed + num_ranks, 100 / num_ranks + 10);
    run_communicators(num_ranks, 60, [&](const std::shared_ptr<Communicator>& comm, Meeting& meeting) {
      Caller caller(comm);
      caller.connect(meeting);
      for (size_t i = 0; i < calls.size(); ++i) check_call(caller, calls[i], static_cast<int>(i));
      caller.collectives.close();
    });
  }
}

// Every few calls a rank refuses, or makes a different call; the next call is right again.
TEST(Collective, GoesOnAfterRefusalsAndDisagreements) {
  const uint64_t seed = test_seed();
  for (const int num_ranks : {2, 3}) {
    const std::vector<Call> calls = draw_calls(seed + num_ranks, 60);
    run_communicators(num_ranks, 60, [&](const std::shared_ptr<Communicator>& comm, Meeting& meeting) {
      Caller caller(comm);
      caller.connect(meeting);
      for (size_t i = 0; i < calls.size(); ++i) {
        const int number = static_cast<int>(i), odd_one = number / 3 % num_ranks;
        if (number % 3 == 1 && comm->member().rank == odd_one) {
          caller.collectives.refuse("reasons of its own", nullptr);
        } else if (number % 3 == 1) {
          EXPECT_THROW(check_call(caller, calls[i], number), PeerRefused);
        } else if (number % 3 == 2) {
          Call other = calls[i];
          other.count += comm->member().rank == odd_one ? 5 : 0;
          EXPECT_THROW(check_call(caller, other, number), CallMismatch);
        } else {
          check_call(caller, calls[i], number);
        }
      }
      caller.collectives.close();
    });
  }
}

TEST(Collective, AnAbsentRankIsATimeoutInItsOwnWords) {
  run_communicators(3, 0.3, [&](const std::shared_ptr<Communicator>& comm, Meeting& meeting) {
    Caller caller(comm);
    caller.connect(meeting);
    if (comm->member().rank != 1) {
      try {
        check_call(caller, {100, DType::kFloat32, false}, 0);
        ADD_FAILURE() << "rank " << comm->member().rank << " did not notice";
      } catch (const PeerTimeout& timeout) {
        EXPECT_STREQ(timeout.operation, "one_shot_all_reduce");
        EXPECT_STREQ(timeout.awaited, "call");
        EXPECT_EQ(timeout.report.reason == Reason::kPoisoned ? timeout.report.culprit : timeout.report.peer, 1);
        EXPECT_NE(std::string(timeout.what()).find("for the call from rank"), std::string::npos) << timeout.what();
      }
    }
    meeting.wait();
  });
}

TEST(Collective, TracesItsOwnSlices) {
  run_communicators(2, 60, [&](const std::shared_ptr<Communicator>& comm, Meeting& meeting) {
    Caller caller(comm, 1 << 20);
    caller.connect(meeting);
    Collectives& collectives = caller.collectives;
    collectives.tracer().start(1000);
    check_call(caller, {10000, DType::kFloat32, false}, 0);  // 40,000 bytes: five chunks
    collectives.tracer().stop();
    const TraceDump dump = collectives.tracer().read();
    EXPECT_EQ(count(dump, collective_kind::kPush), 5);
    EXPECT_EQ(count(dump, TraceKind::kReduce), 5);
    EXPECT_EQ(count(dump, TraceKind::kKernel), 1 * collectives.device().warps_per_block() *
                                                   std::min(5, std::max(1, collectives.device().default_blocks())));
    collectives.close();
  });
}

// Several clients on one communicator, made and closed in any order; each keeps working while another is closed.
TEST(Clients, LiveAndEndIndependently) {
  const MoeConfig config{.num_ranks = 3, .num_experts = 3, .num_topk = 1, .hidden = 8, .num_max_tokens_per_rank = 4};
  run_communicators(3, 60, [&](const std::shared_ptr<Communicator>& comm, Meeting& meeting) {
    MoeConfig own = config;
    own.rank = comm->member().rank;
    auto ep = std::make_unique<ExpertParallel>(comm, own);
    auto first = std::make_unique<Caller>(comm), second = std::make_unique<Caller>(comm);
    first->connect(meeting);
    meeting.connect(*ep);
    second->connect(meeting);
    check_call(*first, {100, DType::kFloat32, false}, 0);
    check_call(*second, {70, DType::kBfloat16, true}, 1);
    first->collectives.close();
    first.reset();
    EXPECT_THROW(
        {
          Collectives unconnected(comm, kWorkspace);
          unconnected.all_reduce({}, 0, {}, nullptr);
        },
        std::runtime_error);
    check_call(*second, {5000, DType::kFloat32, true}, 2);
    auto third = std::make_unique<Caller>(comm);
    third->connect(meeting);
    check_call(*third, {1, DType::kFloat32, true}, 3);
    check_call(*second, {0, DType::kFloat32, true}, 4);
    ep->close();
    check_call(*third, {9, DType::kBfloat16, false}, 5);
    second->collectives.close();
    third->collectives.close();
  });
}

}  // namespace
}  // namespace moe_a2a
