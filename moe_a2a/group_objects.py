"""of_group(): an object that lives as long as the default process group, for code with no better place to keep it. Example: a
leaderboard submission, which is one function and gets a new group for each case."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch

from moe_a2a import devices

_lock = threading.Lock()
_open: dict[Callable[..., Any], tuple[Any, dict[str, Any], Any]] = {}  # by kind: the group, the arguments, the object
_destroy: Callable[..., None] | None = None  # PyTorch's own, once replaced


def of_group(kind: Callable[..., Any], **arguments: Any) -> Any:
    """`kind(None, **arguments)` on the default process group; kind: moe_a2a.ExpertParallel or moe_a2a.Collectives.

    All ranks make the object in their first call. Later calls with equal arguments return it; a call with other arguments
    closes it and makes another. torch.distributed.destroy_process_group() closes it before it destroys the default group.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError("there is no default process group; call torch.distributed.init_process_group() first")
    with _lock:
        group, known, made = _open.get(kind, (None, None, None))
        if made is not None and group is dist.group.WORLD and known == arguments and not made.is_closed:
            return made
        if made is not None:
            del _open[kind]
            made.close()
        _watch(dist)
        if arguments.get("device") is not None:
            _make_current(dist.get_rank(), arguments["device"])
        made = kind(None, **arguments)
        _open[kind] = (dist.group.WORLD, arguments, made)
        return made


def _make_current(rank: int, device: Any) -> None:
    """NCCL exchanges Python objects on the current GPU. A wrong device is for the object itself to refuse, on every rank."""
    with contextlib.suppress(TypeError, ValueError):
        chosen = devices.checked_device(rank, device)
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)


def opened(kind: Callable[..., Any]) -> Any:
    """The open object of this kind that of_group() has made, or None."""
    return _open[kind][-1] if kind in _open else None


def _watch(dist: Any) -> None:
    """PyTorch does not announce the end of a group, and its own clean-up may run after the device's."""
    global _destroy
    if _destroy is None:
        _destroy, dist.destroy_process_group = dist.destroy_process_group, _close_and_destroy


def _close_and_destroy(group: Any = None) -> None:
    import torch.distributed as dist

    assert _destroy is not None
    try:
        if group is None or group is dist.group.WORLD:
            with _lock:
                while _open:
                    _open.popitem()[1][-1].close()
    finally:
        _destroy(group)
