"""Statistics over all ranks. Every rank makes the same calls and gets the same result."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def of_all_ranks(times: Tensor) -> Tensor:
    """[n] of this rank -> [R, n]."""
    parts = [torch.empty_like(times) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, times.contiguous())
    return torch.stack(parts)


def slowest_rank_median(times: Tensor) -> float:
    return of_all_ranks(times).median(dim=1).values.max().item()


def medians_us(times: Tensor) -> list[float]:
    """Seconds [n, steps] of this rank -> microseconds of each step: the slowest rank's median."""
    return [1e6 * slowest_rank_median(step) for step in times.T]


def p99(times: Tensor) -> float:
    """The 99th percentile over all ranks and iterations."""
    return of_all_ranks(times).flatten().quantile(0.99).item()
