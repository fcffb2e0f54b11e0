// The library's exceptions as Python's.
#pragma once

namespace moe_a2a::bindings {

// Registers the translation, once.
void translate_errors();

}  // namespace moe_a2a::bindings
