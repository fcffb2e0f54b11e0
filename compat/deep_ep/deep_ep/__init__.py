"""deep_ep over moe_a2a: see moe_a2a.integrations.deep_ep."""

from moe_a2a.integrations.deep_ep import (
    Buffer,
    Config,
    ElasticBuffer,
    EPBuffer,
    EPHandle,
    EventHandle,
    EventOverlap,
    HybridEPBuffer,
    topk_idx_t,
)

__all__ = [
    "Buffer",
    "Config",
    "EPBuffer",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "HybridEPBuffer",
    "topk_idx_t",
]
