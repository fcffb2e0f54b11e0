"""What callers import from deep_ep.utils."""

from moe_a2a.integrations.deep_ep.events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
