// Buffers a file's text and passes it to the sink in large pieces.
#pragma once

#include <string>

#include "trace_export/timeline.h"

namespace moe_a2a::trace_export {

class Output {
 public:
  explicit Output(const Sink& sink) : sink_(sink) { text.reserve(2 * kPiece); }

  void flush_if_full() {
    if (text.size() >= kPiece) flush();
  }
  void flush() {
    sink_(text);
    text.clear();
  }

  std::string text;

 private:
  static constexpr size_t kPiece = 1 << 20;
  const Sink& sink_;
};

}  // namespace moe_a2a::trace_export
