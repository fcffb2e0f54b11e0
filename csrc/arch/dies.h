// How many blocks AMD's GPUs keep resident, one per compute unit, and on how many dies (XCDs).
#pragma once

namespace moe_a2a {

// MI200 has 104 or 110 compute units: as many as ROCr allows to cooperative launches. With HSA_COOP_CU_COUNT=1 that is
// what HIP reports as the compute units.
constexpr int resident_blocks_of_mi200(int compute_units) {
  return compute_units < 104 ? compute_units : compute_units / 8 * 8 - 8;
}

// MI300 and MI350 deal the blocks of a launch to their dies in turn: block i runs on die i % n, even if only other dies
// have compute units left. HIP before 7.2 does not tell n. This is n or a multiple of it: a die has at most 40 compute
// units, all dies of a device have equally many, and there are 1, 2, 4, 6 or 8.
constexpr int most_dies_of_mi300(int compute_units) {
  if (compute_units <= 40) return 1;
  const int larger_first[] = {8, 6, 4, 2};
  for (const int dies : larger_first) {
    if (compute_units % dies == 0) return dies;
  }
  return 1;
}

}  // namespace moe_a2a
