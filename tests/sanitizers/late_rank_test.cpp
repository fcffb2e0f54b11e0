// A rank that is late, beside a peer that goes on: the peer refuses, or the late rank gives up. What is queued behind
// such a dispatch changes nothing, and the ranks stay in step.
//
// Compiled without access control: some calls are launched as if they had been queued before the host saw a report.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "one_token.h"
#include "thread_ranks.h"

namespace moe_a2a {
namespace {

constexpr LaunchPlace kPlace{.num_blocks = 3};

// A dispatch of nothing, or of one token.
DispatchInput input_of(const std::vector<float>& x, const int32_t* expert) {
  return {
      .num_tokens = static_cast<int>(x.size()) / kRowLength, .topk_idx = {expert, false}, .x = rows_of(x, kRowLength)};
}

class LateRank : public ::testing::TestWithParam<int> {
 protected:
  static constexpr int kLate = 0, kAhead = 1;

  // Runs program(ep, meeting) on two ranks; what their close() still reports is left to the program's own checks.
  template <class Program>
  void run(int num_buffers, double timeout, const Program& program) {
    run_communicators(2, timeout, [&](const std::shared_ptr<Communicator>& comm, Meeting& meeting) {
      MoeConfig config = one_token_config(2, GetParam());
      config.rank = comm->member().rank;
      config.num_buffers = num_buffers;
      ExpertParallel ep(comm, config);
      meeting.connect(ep);
      program(ep, meeting);
      meeting.wait();
      try {
        ep.close();
      } catch (const std::exception&) {
      }
    });
  }
};

TEST_P(LateRank, StaysInStepWithAPeerThatRefusesTwice) {
  run(1, 20.0, [&](ExpertParallel& ep, Meeting& meeting) {
    const auto handle = dispatch_one(ep, 1, kPlace);
    if (ep.config().rank == kLate) ep.release(*handle, kPlace);
    meeting.wait();
    if (ep.config().rank == kAhead) {
      ep.refuse_dispatch("no buffer is free", kPlace);
      ep.release(*handle, kPlace);
      ep.refuse_dispatch("a bad argument", kPlace);
    }
    meeting.wait();
    for (const char* why : {"no buffer is free", "a bad argument"}) {
      if (ep.config().rank != kLate) break;
      try {
        dispatch_one(ep, 2, kPlace);
        ep.raise_reported();
        ADD_FAILURE() << "was not told: " << why;
      } catch (const PeerRefused& refused) {
        EXPECT_NE(std::string(refused.what()).find(why), std::string::npos) << refused.what();
      }
    }
    combine_one(ep, *dispatch_one(ep, 3, kPlace), 4, kPlace);
  });
}

// The late rank has not yet received the sums of its open dispatch when its peer's void one is followed by a combine.
TEST_P(LateRank, KeepsItsSumsWhenItRefusesThePeersNextDispatch) {
  run(2, 20.0, [&](ExpertParallel& ep, Meeting& meeting) {
    if (ep.device().is_synchronous()) return;  // there the void dispatch raises at once
    const std::vector<float> x(ep.config().rank == kLate ? kRowLength : 0, 1.0f);
    const int32_t expert = 1 - ep.config().rank;
    const auto first = ep.dispatch(input_of(x, &expert), Layout::kRows, 1, kPlace);
    const auto second = ep.dispatch(input_of(x, &expert), Layout::kRows, 1, kPlace);
    meeting.wait();
    std::vector<float> out(kRowLength), y(ep.config().route_capacity() * kRowLength, 5.0f);
    CombineInput sums{.y = rows_of(y, kRowLength), .num_y_rows = ep.config().route_capacity()};
    if (ep.config().rank == kLate) {
      ep.refuse_dispatch("no buffer is free", kPlace);
      meeting.wait();
      meeting.wait();
      ep.combine(*first, sums, out.data(), kPlace);
      EXPECT_EQ(out[0], 5.0f);
    } else {
      ep.combine(*first, sums, out.data(), kPlace);
      meeting.wait();
      const auto unsent = ep.dispatch_send(input_of(x, &expert), kPlace);
      ep.dispatch_recv(*unsent, Layout::kRows, 1, kPlace);
      EXPECT_EQ(ep.region().expert_offsets(unsent->buffer, ep.config().num_local_experts), 0);
      const std::vector<float> other(y.size(), 99.0f);
      sums.y = rows_of(other, kRowLength);
      ep.launch(ep.send_args(*unsent, sums), kPlace.num_blocks, nullptr);
      meeting.wait();
      EXPECT_THROW(ep.raise_reported(), PeerRefused);
    }
    ep.release(*second, kPlace);
  });
}

TEST_P(LateRank, SendsNothingAfterItGaveUpWaitingForACredit) {
  run(1, 0.5, [&](ExpertParallel& ep, Meeting& meeting) {
    if (ep.device().is_synchronous()) return;  // there nothing is queued behind a wait that gives up
    const int32_t expert = 1 - ep.config().rank;
    const std::vector<float> none, one(kRowLength, 1.0f), two(kRowLength, 2.0f);
    std::vector<float> out(kRowLength), y(ep.config().route_capacity() * kRowLength, 5.0f);
    const CombineInput sums{.y = rows_of(y, kRowLength), .num_y_rows = ep.config().route_capacity()};
    auto handle = ep.dispatch(input_of(none, &expert), Layout::kRows, 1, kPlace);
    meeting.wait();
    if (ep.config().rank == kLate) {
      ep.combine(*handle, sums, out.data(), kPlace);
      handle = ep.dispatch(input_of(one, &expert), Layout::kRows, 1, kPlace);  // gives up: no credit comes
      meeting.wait();
      meeting.wait();
      const DispatchInput input = input_of(two, &expert);
      const auto next = ep.make_handle(input, 0);
      ep.launch(DispatchArgs{.send = ep.send_args(input, *next, kPlace),
                             .recv = ep.recv_args(*next, next->number),
                             .num_send_blocks = 2},
                kPlace.num_blocks, nullptr);
      meeting.wait();
      EXPECT_THROW(ep.raise_reported(), PeerTimeout);
    } else {
      meeting.wait();
      ep.combine(*handle, sums, out.data(), kPlace);
      meeting.wait();
      meeting.wait();
      EXPECT_THROW(
          {
            ep.dispatch(input_of(none, &expert), Layout::kRows, 1, kPlace);
            ep.raise_reported();
          },
          std::runtime_error);
      EXPECT_NE(*reinterpret_cast<const float*>(ep.region().row.at(0, kLate, 0)), 2.0f);
    }
  });
}

// A rank's own sums may be in recv_x. There a peer's next dispatch on the same buffer, under another bound, may put its
// rows as soon as it has all credits, before the late rank has added its sums.
TEST_P(LateRank, AddsItsOwnSumsInReceivedRowsAfterAPeersNextDispatch) {
  run(1, 20.0, [&](ExpertParallel& ep, Meeting& meeting) {
    constexpr int kOwner = 1;  // its own row, the second one, is the peer's second row under the larger bound
    const bool is_owner = ep.config().rank == kOwner;
    const std::vector<float> x(is_owner ? kRowLength : 0, 1.0f), next(is_owner ? 0 : 2 * kRowLength, 99.0f);
    const int32_t experts[] = {kOwner, kOwner};
    DispatchInput input = input_of(x, experts);
    input.num_max_tokens_per_rank = 1;
    const auto first = ep.dispatch(input, Layout::kRows, 1, kPlace);
    const Rows recv_x = {ep.region().row.at(0), ep.config().max_row_stride()};
    const CombineInput sums{.y = recv_x, .num_y_rows = 2, .presummed = true};
    std::vector<float> out(kRowLength);
    BothCombineArgs<CombineSendArgs> both{ep.send_args(*first, sums), ep.recv_args(*first, out.data(), kPlace), 1};
    if (is_owner) {
      both.recv.num_tokens = 0;  // late: so far it has only sent, and given its credit
      ep.launch(both, 2, nullptr);
    } else {
      ep.combine(*first, sums, out.data(), kPlace);
    }
    meeting.wait();
    std::shared_ptr<DispatchHandle> second;
    if (!is_owner) second = ep.dispatch_send(input_of(next, experts), kPlace);
    meeting.wait();
    if (is_owner) {
      both.send.is_sent = true;
      both.recv.num_tokens = 1;
      ep.launch(both, 2, nullptr);
      ep.raise_reported();
      EXPECT_EQ(out, x);
      ep.finish_combine(*first);
      second = ep.dispatch_send(input_of(next, experts), kPlace);
    }
    ep.dispatch_recv(*second, Layout::kRows, 1, kPlace);
    ep.release(*second, kPlace);
  });
}

INSTANTIATE_TEST_SUITE_P(NumMaxLlTokens, LateRank, ::testing::Values(0, 2));

}  // namespace
}  // namespace moe_a2a
