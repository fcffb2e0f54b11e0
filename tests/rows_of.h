// A tensor that a test holds in a vector, as the rows of a call.
#pragma once

#include <vector>

#include "rows/row_layout.h"

namespace moe_a2a {

template <class T>
Rows rows_of(const std::vector<T>& values, int64_t row_length) {
  return {reinterpret_cast<const std::byte*>(values.data()), row_length * int64_t{sizeof(T)}};
}

}  // namespace moe_a2a
