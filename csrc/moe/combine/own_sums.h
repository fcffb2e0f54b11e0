// A rank's own sums. If the caller pre-summed and one launch does both halves, they stay in `y`: combine_send omits
// them, and combine_recv reads them in place.
#pragma once

#include "moe/args.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

class OwnSums {
 public:
  // Launches of a single half do not have `y` on both sides, so all sums travel.
  MOE_A2A_DEVICE explicit OwnSums(const CombineSendArgs* send = nullptr) : send_(send) {}

  MOE_A2A_DEVICE bool are_kept() const { return send_ != nullptr && send_->can_keep_own_sums(); }
  MOE_A2A_DEVICE bool keep(int rank) const { return are_kept() && rank == send_->context.heap.rank; }

  // The sum for one of this rank's tokens, if kept.
  MOE_A2A_DEVICE const std::byte* of(int token) const {
    return send_->given_sum(send_->context.heap.rank * send_->context.config.num_max_tokens_per_rank + token);
  }

 private:
  const CombineSendArgs* send_;
};

}  // namespace moe_a2a::inline MOE_A2A_TARGET
