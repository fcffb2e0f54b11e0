// Number formats as plain bits, the same layout on every target. Conversions are in the target's header, since machines
// have instructions for them.
#pragma once

#include <cstdint>

#include "arch/attributes.h"

namespace moe_a2a {

enum class DType : int { kFloat32, kFloat16, kBfloat16, kFloat8 };

struct Half {
  uint16_t bits;
};
struct Bfloat16 {
  uint16_t bits;
};
struct Float8 {  // e4m3: "fn" on the CPU, NVIDIA and gfx950; "fnuz" on gfx942 (see kFloat8Max of the target)
  uint8_t bits;
};

MOE_A2A_HOST_DEVICE constexpr int size_of(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : dtype == DType::kFloat8 ? 1 : 2;
}
constexpr const char* name_of(DType dtype) {
  constexpr const char* kNames[] = {"float32", "float16", "bfloat16", "float8"};
  return kNames[static_cast<int>(dtype)];
}

}  // namespace moe_a2a
