"""Runs an action that may fail on one rank on all of them together, so that no rank waits for one that has failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


class FailedSomewhereError(RuntimeError):
    """Raised on every rank, with the text of the first rank that failed."""


def together(action: Callable[[], T]) -> T:
    """The result of action() if it succeeded on every rank; otherwise raises on every rank."""
    result, why = None, None
    try:
        result = action()
    except FailedSomewhereError as error:  # from a nested together(): it already names the rank
        why = str(error)
    except Exception as error:
        why = f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
    said: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(said, why)
    if any(said):
        raise FailedSomewhereError(next(text for text in said if text))
    return result  # type: ignore[return-value]
