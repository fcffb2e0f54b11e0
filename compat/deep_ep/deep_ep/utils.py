"""deep_ep.utils over moe_a2a."""

from moe_a2a.integrations.deep_ep.utils import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
