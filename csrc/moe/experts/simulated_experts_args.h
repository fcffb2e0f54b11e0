// Arguments of simulated experts, which only scale their rows.
#pragma once

#include "moe/args.h"

namespace moe_a2a {

// Factors of the local experts, of the rows' type.
struct ExpertScales {
  const std::byte* data = nullptr;  // null: `factor` for all
  int64_t stride = 0;               // bytes between experts
  bool per_column = false;          // [El, hidden], else [El]
  float factor = 1;

  MOE_A2A_HOST_DEVICE const std::byte* of(int expert) const { return data + expert * stride; }
};

struct SimulatedExpertsArgs {
  Context context;
  int buffer = 0;
  Layout layout = Layout::kRows;
  ExpertScales scales;
  std::byte* sums = nullptr;  // [R * T, hidden]: one row per row of recv_x; the input of a presummed combine
  bool vector_rows = true;    // sums and scales allow 16-byte vectors
};

// combine_send of the same sums, formed from the landed rows as they are sent: there is no y.
struct SimulatedCombineSendArgs : CombineSendArgs {
  Layout layout = Layout::kRows;
  ExpertScales scales;
};

}  // namespace moe_a2a
