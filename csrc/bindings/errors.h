// Translates the library's exceptions into Python's.
#pragma once

namespace moe_a2a::bindings {

// Registers the translation; call it once.
void translate_errors();

}  // namespace moe_a2a::bindings
