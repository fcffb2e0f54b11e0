"""Events of the current stream. All calls run there, so what they return is ordered with the caller's own work."""

from __future__ import annotations

from typing import Any

import torch


class EventHandle:
    """A point on the current stream. Nothing on the CPU, where calls return when they are done."""

    def __init__(self) -> None:
        self._event = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self._event = torch.cuda.Event()
            self._event.record()

    def current_stream_wait(self) -> None:
        """Lets the current stream wait for that point."""
        if self._event is not None:
            self._event.wait()


class EventOverlap:
    """An EventHandle or None, and tensors to keep until it is waited for. As a context manager it waits at the end."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[torch.Tensor, ...] | None = None):
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        if self.event is not None:
            self.event.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.current_stream_wait()


def wait_for(previous_event: EventOverlap | None) -> None:
    if previous_event is not None:
        previous_event.current_stream_wait()


def event_if(wanted: bool) -> EventOverlap:
    return EventOverlap(EventHandle() if wanted else None)
