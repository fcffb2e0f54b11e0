// Memory orders and scopes, for the atomics of every target.
#pragma once

namespace moe_a2a {

enum class Order { kRelaxed, kAcquire, kRelease, kAcqRel };

// Who must see the effect: the threads of a block, of this device, or of every device and the host.
enum class Scope { kBlock, kDevice, kSystem };

}  // namespace moe_a2a
