"""deep_ep.hybrid_ep_buffer over moe_a2a."""

from moe_a2a.integrations.deep_ep.hybrid_ep_buffer import HybridEPBuffer, indices_to_map

__all__ = ["HybridEPBuffer", "indices_to_map"]
