// Included by the source file of a kernel family; see kernel_family.h.
#pragma once

#include "comm/kernel_family.h"
#include "comm/traced.h"

namespace moe_a2a::inline MOE_A2A_TARGET {

template <class Kernel>
KernelEntry entry_of() {
  return {.args = id_of_args<typename Kernel::Args>(),
          .prepare = prepare<Kernel>,
          .launch = [](const LaunchSite& site, const void* args) {
            launch<Kernel>(site, *static_cast<const typename Kernel::Args*>(args));
          }};
}

template <const Vocabulary& kVocabulary, class... Kernel>
std::span<const KernelEntry> entries_of() {
  static const KernelEntry entries[] = {entry_of<Traced<Kernel, kVocabulary>>()...};
  return entries;
}

}  // namespace moe_a2a::inline MOE_A2A_TARGET

#define MOE_A2A_KERNEL_FAMILY(name, vocabulary, ...)                                   \
  namespace moe_a2a {                                                                  \
  std::span<const KernelEntry> MOE_A2A_JOIN(MOE_A2A_JOIN(name, _), MOE_A2A_TARGET)();  \
  std::span<const KernelEntry> MOE_A2A_JOIN(MOE_A2A_JOIN(name, _), MOE_A2A_TARGET)() { \
    return MOE_A2A_TARGET::entries_of<vocabulary, __VA_ARGS__>();                      \
  }                                                                                    \
  }
