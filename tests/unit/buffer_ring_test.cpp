// The bookkeeping of buffers: whose turn it is, and what reports of refusals change after queued launches.
#include "moe/buffer_ring.h"

#include <gtest/gtest.h>

#include "moe/vocabulary.h"

namespace moe_a2a {
namespace {

using Stage = DispatchHandle::Stage;

std::shared_ptr<DispatchHandle> dispatch(BufferRing& ring) {
  auto handle = std::make_shared<DispatchHandle>();
  handle->buffer = ring.next();
  handle->number = ring.number_of_next(handle->buffer);
  handle->stage = Stage::kReceived;
  ring.take(handle->buffer, handle);
  return handle;
}

void combine(BufferRing& ring, DispatchHandle& handle) {
  ring.expect_refusal(handle.buffer);
  handle.stage = Stage::kCombined;
  ring.give_back(handle.buffer);
}

Report refusal_by_rank_1(int buffer, uint64_t epoch) {
  Report report;
  report.reason = Reason::kRefused;
  report.peer = 1;
  report.buffer = buffer;
  report.expected_epoch = epoch;
  return report;
}

Report refused_dispatch(const DispatchHandle& handle, uint64_t epoch) {
  Report report = refusal_by_rank_1(handle.buffer, epoch);
  report.operation = moe_op::kDispatchRecv;
  report.refusal_count = static_cast<uint32_t>(handle.number.number);
  return report;
}

Report refused_combine(const DispatchHandle& handle, uint64_t epoch, uint32_t count) {
  Report report = refusal_by_rank_1(handle.buffer, epoch);
  report.operation = moe_op::kCombineRecv;
  report.refusal_count = count;
  report.seen_epoch = handle.number.number;
  return report;
}

// The report comes from the slot behind those of the buffers, with the dispatch's number in place of an epoch.
Report without_buffer(int num_buffers, uint64_t number) { return refusal_by_rank_1(num_buffers, number); }

TEST(BufferRing, TakesADroppedHandlesBufferOnlyIfNoOtherIsFree) {
  BufferRing ring(2);
  auto first = dispatch(ring), second = dispatch(ring);
  EXPECT_EQ(ring.next(), -1);
  second.reset();
  EXPECT_EQ(ring.next(), 1);
  EXPECT_NE(ring.holder(1), nullptr);
  combine(ring, *first);
  EXPECT_EQ(ring.next(), 0);
  EXPECT_EQ(ring.holder(0), nullptr);
}

TEST(BufferRing, ARefusedDispatchFreesItsBufferAndIsReportedOnce) {
  BufferRing ring(2);
  auto handle = dispatch(ring);
  auto second = dispatch(ring);
  EXPECT_FALSE(ring.is_known(refused_dispatch(*handle, 1)));
  EXPECT_TRUE(ring.is_known(refused_dispatch(*handle, 1)));
  EXPECT_EQ(handle->stage, Stage::kRefused);
  EXPECT_EQ(ring.next(), handle->buffer);
}

TEST(BufferRing, ARefusedCombineIsOpenAgainForALaterAttempt) {
  BufferRing ring(1);
  auto handle = dispatch(ring);
  combine(ring, *handle);
  EXPECT_FALSE(ring.is_known(refused_combine(*handle, 1, RefusalCount::pack(3, 2))));
  EXPECT_EQ(handle->stage, Stage::kCombineSent);
  EXPECT_EQ(handle->attempt, 4u);
  EXPECT_EQ(handle->seen.of_rank[1], 2);
  EXPECT_EQ(ring.next(), -1);

  combine(ring, *handle);  // its refusal has the same epoch, and is news
  EXPECT_FALSE(ring.is_known(refused_combine(*handle, 1, RefusalCount::pack(4, 2))));
  EXPECT_EQ(handle->attempt, 5u);
}

TEST(BufferRing, ARefusedCombineDoesNotOpenALaterOneOfItsBuffer) {
  BufferRing ring(2);
  auto refused = dispatch(ring);
  combine(ring, *refused);
  combine(ring, *dispatch(ring));
  auto later = dispatch(ring);  // queued, like its combine, before the host has seen the report
  combine(ring, *later);
  EXPECT_FALSE(ring.is_known(refused_combine(*refused, 1, RefusalCount::pack(1, 0))));
  EXPECT_EQ(later->stage, Stage::kCombined);
  EXPECT_EQ(ring.holder(later->buffer), nullptr);
  EXPECT_EQ(ring.next(), 1);
  combine(ring, *dispatch(ring));
  EXPECT_EQ(ring.next(), 0);  // as on the other ranks
}

TEST(BufferRing, ACombineRefusedForGoodStaysClosed) {
  BufferRing ring(1);
  auto handle = dispatch(ring);
  combine(ring, *handle);
  EXPECT_FALSE(ring.is_known(refused_combine(*handle, 1, RefusalCount::kFinal)));
  EXPECT_EQ(handle->stage, Stage::kCombined);
  EXPECT_EQ(ring.next(), 0);
}

TEST(BufferRing, ADispatchThatAPeerHadNoBufferForDidNotTakePlace) {
  BufferRing ring(2);
  auto first = dispatch(ring);
  const uint32_t since = ring.number_of_next(1).since;
  auto second = dispatch(ring);
  const Report report = without_buffer(2, second->number.number);
  EXPECT_FALSE(ring.is_known(report));
  EXPECT_TRUE(ring.is_known(report));
  EXPECT_EQ(second->stage, Stage::kClosed);
  EXPECT_EQ(ring.next(), 1);
  EXPECT_EQ(ring.holder(1), nullptr);
  EXPECT_EQ(ring.number_of_next(1).since, since + 1);  // the refused one counts
}

TEST(BufferRing, ARankThatRefusedTheSameDispatchKnowsOfIt) {
  BufferRing ring(2);
  ring.take(ring.next(), nullptr);
  EXPECT_EQ(ring.newest(), nullptr);
  EXPECT_TRUE(ring.is_known(without_buffer(2, 1)));
}

TEST(BufferRing, ACreditCarriesTheDispatchesRefusedSince) {
  BufferRing ring(1);
  auto handle = dispatch(ring);
  EXPECT_EQ(ring.credit_note(*handle).refused, 0u);
  ring.pass();
  EXPECT_EQ(ring.credit_note(*handle).refused, 0u);
  ring.refuse();
  EXPECT_EQ(ring.credit_note(*handle).refused, 2u);
  EXPECT_EQ(ring.num_dispatches(), 3u);
}

TEST(BufferRing, ACreditTellsOneDispatchOfABufferFromTheNext) {
  BufferRing ring(1);
  combine(ring, *dispatch(ring));
  const DispatchNumber late = ring.number_of_next(0);
  ring.refuse();  // the one that another rank is late for
  auto handle = dispatch(ring);
  const CreditNote note = ring.credit_note(*handle);
  EXPECT_EQ(note.since, 2u);
  EXPECT_TRUE(CreditNote::may_be_of(note.payload(), handle->number));
  EXPECT_FALSE(CreditNote::may_be_of(note.payload(), late));
}

TEST(BufferRing, ANoteFitsIntoASignal) {
  const CreditNote most{.since = CreditNote::kMostRefused, .refused = CreditNote::kMostRefused};
  EXPECT_LE(most.payload(), Signal::kPayloadMask);
  EXPECT_EQ(CreditNote::refused_in(most.payload()), CreditNote::kMostRefused);
  EXPECT_TRUE(CreditNote::may_be_of(most.payload(), {.number = 9, .since = most.since}));
  EXPECT_FALSE(CreditNote::may_be_of(most.payload(), {.number = 9, .since = most.since - 1}));
}

TEST(BufferRing, ANoteCountsNoFurtherThanItHasRoom) {
  BufferRing ring(2);
  auto handle = dispatch(ring);
  for (uint32_t i = 0; i < CreditNote::kMostRefused + 9; ++i) ring.pass();
  ring.refuse();
  EXPECT_EQ(ring.credit_note(*handle).refused, CreditNote::kMostRefused);
  EXPECT_EQ(ring.number_of_next(0).since, CreditNote::kMostRefused);
}

}  // namespace
}  // namespace moe_a2a
