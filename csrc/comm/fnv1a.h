// FNV-1a, over bytes or over whole words.
#pragma once

#include <cstdint>

namespace moe_a2a {

struct Fnv1a {
  uint64_t digest = 0xcbf29ce484222325u;

  constexpr void add(uint64_t value) { digest = (digest ^ value) * 0x100000001b3u; }
};

}  // namespace moe_a2a
