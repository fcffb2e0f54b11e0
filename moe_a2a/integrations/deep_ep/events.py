"""Events of the current stream. All calls run on that of their object's device, so what they return is ordered with the caller's
own work there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class EventHandle:
    """A point on the current stream of the current device. Nothing on the CPU, where calls return when they are done."""

    def __init__(self) -> None:
        self._event = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self._event = torch.cuda.Event()
            self._event.record()

    def current_stream_wait(self) -> None:
        """Makes the current stream wait for that point."""
        if self._event is not None:
            self._event.wait()


class EventOverlap:
    """An EventHandle or None, and tensors to keep until it is waited for. As a context manager it waits at the end.

    hook_after_wait: called once by the next wait, which returns its result. event_overlap(release_handle=True) is for
    `with`: the event is dropped at the end.
    """

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[torch.Tensor, ...] | None = None):
        self.event = event
        self.extra_tensors = extra_tensors
        self.hook_after_wait: Callable[[], Any] | None = None
        self._releases_at_exit = False

    def current_stream_wait(self, release_handle: bool = False) -> Any:
        """Makes the current stream wait; returns the hook's result, or None. release_handle: drops the event."""
        if self.event is not None:
            self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        if release_handle:
            self.event = None
        return None if hook is None else hook()

    wait = current_stream_wait

    def register_hook_after_wait(self, hook_after_wait: Callable[[], Any]) -> None:
        if self.hook_after_wait is not None:
            raise RuntimeError("this EventOverlap has a hook already; wait for it first")
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        self._releases_at_exit = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *exception: Any) -> None:
        release, self._releases_at_exit = self._releases_at_exit, False
        self.current_stream_wait(release)


def wait_for(previous_event: EventOverlap | None, device: torch.device) -> None:
    """device: here and below, of the object. The thread's current one may be another."""
    if previous_event is not None:
        with _current(device):
            previous_event.current_stream_wait()


def event_if(wanted: bool, device: torch.device) -> EventOverlap:
    if not wanted:
        return EventOverlap()
    with _current(device):
        return EventOverlap(EventHandle())


def event_before(finish: Callable[[], Any], device: torch.device) -> EventOverlap:
    """An event of what has been sent; waiting for it receives the rest and returns it."""
    event = event_if(True, device)
    event.register_hook_after_wait(finish)
    return event


def _current(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
