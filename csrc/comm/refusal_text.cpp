#include "comm/refusal_text.h"

#include <algorithm>
#include <cstring>

namespace moe_a2a {

RefusalText to_refusal_text(const std::string& why) {
  RefusalText text;  // zero-terminated: the last byte is never written
  size_t length = std::min(why.size(), sizeof(text.word) - 1);
  const auto continues = [&](size_t i) {
    return i < why.size() && (static_cast<unsigned char>(why[i]) & 0xc0) == 0x80;
  };
  while (length > 0 && continues(length)) --length;
  std::memcpy(text.word, why.data(), length);
  return text;
}

}  // namespace moe_a2a
