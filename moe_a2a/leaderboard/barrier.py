"""The harness's barrier: a counter per rank on a page of memory that the ranks' processes share."""

from __future__ import annotations

import mmap
import os
from typing import IO

LINE = 8  # counters of 8 bytes in a cache line

_page: list[memoryview] = []  # of this process, if it is a rank's


def make_page(num_ranks: int) -> IO[bytes]:
    """For the ranks to inherit open; it has no name in the file system."""
    page = os.fdopen(os.memfd_create("moe_a2a_barrier"), "w+b")
    page.truncate(num_ranks * LINE * 8)
    return page


def map_page(path: str) -> None:
    """Called once in each rank's process."""
    with open(path, "r+b") as file:
        _page.append(memoryview(mmap.mmap(file.fileno(), 0)).cast("q"))


class Barrier:
    """Every rank must have synchronised its device. Ranks leave within a few microseconds of each other, and nothing that a
    submission does to torch.distributed affects them. There is no timeout: the harness ends ranks that wait for ever."""

    def __init__(self, rank: int, num_ranks: int):
        self._arrivals = _page[0][: num_ranks * LINE : LINE]
        self._rank = rank

    def __call__(self) -> None:
        arrivals = self._arrivals
        turn = arrivals[self._rank] = arrivals[self._rank] + 1
        while min(arrivals) < turn:
            os.sched_yield()
