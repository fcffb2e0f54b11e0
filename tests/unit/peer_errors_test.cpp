// What the host says of a report.
#include "comm/peer_errors.h"

#include <gtest/gtest.h>

#include "collectives/vocabulary.h"

namespace moe_a2a {
namespace {

std::string text_of(const Report& report) {
  try {
    raise_report(report, kCollectiveVocabulary);
  } catch (const PeerTimeout& error) {
    return error.what();
  }
}

TEST(PeerErrors, ARankThatOthersGaveUpIsNotSaidToHaveWaitedForItself) {
  Report report{.reason = Reason::kPoisoned,
                .operation = collective_op::kOneShot,
                .awaited = collective_kind::kCallWait,
                .rank = 1,
                .peer = 0,
                .reporter = 0,
                .culprit = 1,
                .expected_epoch = 5,
                .seen_epoch = 4,
                .elapsed_seconds = 2};
  const std::string rest =
      "because rank 0 gave up waiting for this rank; that rank is dead, late, or makes different "
      "calls; pass a larger timeout if it is only late";
  EXPECT_EQ(
      text_of(report),
      "rank 1 in one_shot_all_reduce waited 2.000000 s for the call from rank 0 (expected epoch 5, seen 4); it left " +
          rest);
  report.peer = 1;  // it began its call too late and waited for nobody
  EXPECT_EQ(text_of(report), "rank 1 in one_shot_all_reduce did nothing " + rest);
}

}  // namespace
}  // namespace moe_a2a
