"""Everything that differs between CPU ranks and GPU ranks."""

from __future__ import annotations

import platform
from typing import Any

import torch
import torch.distributed as dist

CACHE_BYTES = 256 << 20  # written before each timed call; more than any GPU's last-level cache
WAKING_BYTES = 1 << 20

_ALL_REDUCE = dist.all_reduce  # kept before a submission can replace it


class RankDevice:
    """The device of one rank: "cpu", or GPU number `rank`. Like the public evaluator, it does not choose a current GPU:
    a submission that works on its process's current device must set it."""

    def __init__(self, device_type: str, rank: int):
        self.is_gpu = device_type == "cuda"
        self.device = torch.device("cuda", rank) if self.is_gpu else torch.device("cpu")
        self.backend = "cpu:gloo,cuda:nccl" if self.is_gpu else "gloo"
        # Binds the group to its GPU, as the public evaluator does.
        self.group_options: dict[str, Any] = {"device_id": self.device} if self.is_gpu else {}
        self._cache: torch.Tensor | None = None
        self._message: torch.Tensor | None = None

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def clear_cache(self) -> None:
        """On the CPU the barrier and the other ranks evict enough; a fill would only occupy the cores."""
        if not self.is_gpu:
            return
        if self._cache is None:
            self._cache = torch.empty(CACHE_BYTES, dtype=torch.uint8, device=self.device)
        self._cache.fill_(1)

    def wake_links(self) -> None:
        """After some milliseconds without traffic, the first megabytes over NVLink take 0.1 ms longer. The public evaluator's
        barrier, an NCCL all-reduce, keeps the links awake; ours uses none. Called by every rank."""
        if not self.is_gpu or not dist.is_initialized():
            return
        if self._message is None:
            self._message = torch.zeros(WAKING_BYTES, dtype=torch.uint8, device=self.device)
        _ALL_REDUCE(self._message)


def machine_name(device_type: str) -> str:
    return torch.cuda.get_device_name(0) if device_type == "cuda" else platform.machine()
