"""DeepEP's `Buffer`, `ElasticBuffer`, `EPBuffer` and `HybridEPBuffer` over moe_a2a, for code that calls `deep_ep`::

    from moe_a2a.integrations import deep_ep  # in place of: import deep_ep

    buffer = deep_ep.Buffer(group, num_nvl_bytes)
    recv_x, recv_topk_idx, recv_topk_weights, counts, handle, event = buffer.dispatch(x, topk_idx=..., topk_weights=..., ...)
    combined_x, _, event = buffer.combine(y, handle)

Interface: `deep_ep` 1.2, 2.1 and 2.5, and its branch hybrid-ep (github.com/deepseek-ai/DeepEP). docs/deep_ep.md says what differs,
and how to install this as the top-level package `deep_ep`.
"""

from moe_a2a.integrations.deep_ep.buffer import Buffer, topk_idx_t
from moe_a2a.integrations.deep_ep.config import Config
from moe_a2a.integrations.deep_ep.elastic import ElasticBuffer
from moe_a2a.integrations.deep_ep.ep_buffer import EPBuffer
from moe_a2a.integrations.deep_ep.ep_handle import EPHandle
from moe_a2a.integrations.deep_ep.events import EventHandle, EventOverlap
from moe_a2a.integrations.deep_ep.hybrid_ep_buffer import HybridEPBuffer

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
