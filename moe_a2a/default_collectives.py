"""all_reduce() without an object: uses Collectives of the default process group, made by the first call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from moe_a2a import calls, devices
from moe_a2a.collectives import Collectives
from moe_a2a.group_objects import of_group


@functools.cache
def _kind(device: torch.device) -> Callable[..., Collectives]:
    """of_group() keeps an object of each kind."""
    return functools.partial(Collectives, device=device)


def default_collectives(device: torch.device) -> Collectives:
    """The default group's Collectives for this device. All ranks make them in their first call; they end with the group."""
    made: Collectives = of_group(_kind(device))
    return made


def _collectives_for(x: Any = None) -> Collectives:
    """Those of the device of x. Those of the default device if no Collectives can take x: they tell the peers."""
    is_usable = isinstance(x, torch.Tensor) and x.device.type in ("cpu", "cuda")
    return default_collectives(x.device if is_usable else devices.default_device())


@calls.refuses_wrong_arguments(lambda *x: calls.refused_if_failed(_collectives_for(*x)))
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
    return _collectives_for(x).all_reduce(x, op, algorithm, codec, max_error=max_error, out=out)
