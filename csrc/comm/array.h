// A dense array in a region of memory: a pointer and its strides.
#pragma once

#include <cstdint>

#include "arch/arch.h"

namespace moe_a2a {

// `kRank` dimensions. The first extent is not stored: indexing does not need it.
template <class T, int kRank>
struct Array {
  T* data = nullptr;
  int64_t stride[kRank > 1 ? kRank - 1 : 1] = {};

  template <class... Index>
  MOE_A2A_HOST_DEVICE T* at(Index... index) const {
    static_assert(sizeof...(Index) <= kRank);
    const int64_t indices[] = {static_cast<int64_t>(index)...};
    int64_t offset = 0;
    for (int i = 0; i < static_cast<int>(sizeof...(Index)); ++i) {
      offset += indices[i] * (i < kRank - 1 ? stride[i] : 1);
    }
    return data + offset;
  }
  template <class... Index>
  MOE_A2A_HOST_DEVICE T& operator()(Index... index) const {
    return *at(index...);
  }
};

}  // namespace moe_a2a
