// A set of ranks in one word.
#pragma once

#include <cstdint>

#include "arch/arch.h"

namespace moe_a2a {

struct RankSet {
  uint64_t bits = 0;

  MOE_A2A_HOST_DEVICE bool empty() const { return bits == 0; }
  MOE_A2A_HOST_DEVICE bool contains(int rank) const { return (bits >> rank) & 1; }
  // Calls visit(rank) for all members in round-robin order from `rank` on.
  template <class Visit>
  MOE_A2A_DEVICE void visit_from(int rank, Visit visit) const {
    const RankSet later{bits >> rank << rank};
    for (RankSet rest = *this; !rest.empty();) {
      const int next = RankSet{rest.bits & later.bits}.empty() ? rest.first() : RankSet{rest.bits & later.bits}.first();
      visit(next);
      rest = rest.without(next);
    }
  }
  MOE_A2A_HOST_DEVICE void insert(int rank) { bits |= uint64_t{1} << rank; }
  MOE_A2A_HOST_DEVICE RankSet without(int rank) const { return {bits & ~(uint64_t{1} << rank)}; }
  MOE_A2A_HOST_DEVICE int first() const { return count_trailing_zeros(bits); }
  MOE_A2A_HOST_DEVICE void remove_first() { bits &= bits - 1; }

  MOE_A2A_HOST_DEVICE static RankSet all(int num_ranks) {
    return {num_ranks == 64 ? ~uint64_t{0} : (uint64_t{1} << num_ranks) - 1};
  }
  MOE_A2A_HOST_DEVICE static RankSet only(int rank) { return {uint64_t{1} << rank}; }
};

}  // namespace moe_a2a
