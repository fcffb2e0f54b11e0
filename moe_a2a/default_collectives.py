"""all_reduce() without an object: uses Collectives of the default process group, made by the first call."""

from __future__ import annotations

import threading
from typing import Any

import torch

from moe_a2a import devices
from moe_a2a.collectives import Collectives

_lock = threading.Lock()
_made: dict[torch.device, tuple[Any, Collectives]] = {}


def default_collectives(device: torch.device) -> Collectives:
    """The default group's Collectives for this device. All ranks make them in their first call, and again after the
    default group has been replaced."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError("there is no default process group; call torch.distributed.init_process_group() first")
    with _lock:
        group, made = _made.get(device, (None, None))
        if made is not None and group is dist.group.WORLD and not made.is_closed:
            return made
        if made is not None:
            made.close()
        made = Collectives(dist.group.WORLD, device=device)
        _made[device] = (dist.group.WORLD, made)
        return made


def all_reduce(
    x: torch.Tensor,
    op: str = "sum",
    algorithm: str = "auto",
    codec: str | None = None,
    *,
    max_error: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Collectives.all_reduce() on Collectives of the default process group, which the first call makes."""
    # An x that is no tensor is refused there, where the peers learn of it.
    device = x.device if isinstance(x, torch.Tensor) else devices.default_device()
    return default_collectives(device).all_reduce(x, op, algorithm, codec, max_error=max_error, out=out)
