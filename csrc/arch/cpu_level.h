// A portable build holds the CPU target's kernels once per level of x86-64 (cmake/cpu_levels.cmake).
#pragma once

namespace moe_a2a {

// 2, 3 or 4: the widest level that this machine supports and MOE_A2A_CPU_LEVEL (v2, v3 or v4; default v4) allows. All
// levels give the same bits.
int cpu_level();

}  // namespace moe_a2a
