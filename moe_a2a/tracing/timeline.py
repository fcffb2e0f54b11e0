"""The merged trace: the slices of every warp of every rank, on one clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

# The records of csrc/trace_export/timeline.h; -1: unknown, or not applicable.
SLICE = np.dtype(
    [
        ("begin_ns", "i8"),
        ("end_ns", "i8"),
        ("bytes", "i8"),
        ("rank", "i4"),
        ("block", "i4"),
        ("warp", "i4"),
        ("name", "i4"),
        ("peer", "i4"),
        ("token", "i4"),
        ("polls", "i4"),
        ("expert", "i4"),
        ("rows", "i4"),
        ("instant", "i4"),
    ]
)
ARROW = np.dtype([("source", "i8"), ("sink", "i8")])
SAMPLE = np.dtype([("time_ns", "i8"), ("value", "i8"), ("rank", "i4"), ("name", "i4")])

ROW_WAIT, PARTIAL_WAIT, TABLE_WAIT, CREDIT_WAIT = "row_wait", "partial_wait", "table_wait", "credit_wait"
SIGNAL, SEND, SUM, ROUTE = "signal", "send", "sum", "route"
CALL_WAIT, CHUNK_WAIT, PUSH, REDUCE = "call_wait", "chunk_wait", "push", "reduce"
TILE, STORED_WAIT = "tile", "stored_wait"
WAITS = (
    CREDIT_WAIT, TABLE_WAIT, ROW_WAIT, PARTIAL_WAIT, CALL_WAIT, CHUNK_WAIT, STORED_WAIT, "peer_wait", "clock_wait",
)  # fmt: skip
MOMENTS = (SIGNAL, "gave_up")

# Launches by what they signal. "dispatch" and "combine" are launches of both halves.
DISPATCH_SENDERS = ("dispatch_send", "dispatch")
COMBINE_SENDERS = ("combine_send", "combine")
COLLECTIVES = (
    "one_shot_all_reduce", "two_shot_all_reduce", "ring_all_reduce", "recursive_doubling_all_reduce", "direct_all_reduce",
    "reduce_scatter", "direct_reduce_scatter", "all_gather", "direct_all_gather", "refuse_collective",
)  # fmt: skip

WARP_BITS, BLOCK_BITS = 16, 24  # of the numbers of Timeline.warps(), from the low end; the rank is above them


@dataclass
class Timeline:
    """slices [n] of SLICE; arrows [m] of ARROW: from a signal to the wait that it ended; names: of slices.

    about: the metadata (see merge.py), as in the file.
    """

    slices: np.ndarray
    arrows: np.ndarray
    names: list[str]
    about: dict[str, Any]

    @property
    def num_ranks(self) -> int:
        return self.about["configuration"]["num_ranks"]

    def named(self, *names: str) -> np.ndarray:
        """bool [n]: the slices with one of these names."""
        return np.isin(self.slices["name"], [i for i, name in enumerate(self.names) if name in names])

    def kernels(self) -> np.ndarray:
        """bool [n]: the slices that are launches, or a warp's part of one."""
        return self.named(*self.about["operations"])

    def durations(self) -> np.ndarray:
        return self.slices["end_ns"] - self.slices["begin_ns"]

    def warps(self) -> np.ndarray:
        """int64 [n]: one number per warp of all ranks."""
        return (self.blocks() << WARP_BITS) + self.slices["warp"]

    def blocks(self) -> np.ndarray:
        """int64 [n]: one number per block of all ranks."""
        return (self.slices["rank"].astype(np.int64) << BLOCK_BITS) + self.slices["block"]

    def covered(self, which: np.ndarray) -> np.ndarray:
        """int64 [R]: warp time in nanoseconds that each rank spent in at least one of these slices."""
        warps, begins, ends = merged(self.warps()[which], self.slices["begin_ns"][which], self.slices["end_ns"][which])
        return np.bincount(ranks_of_warps(warps), ends - begins, minlength=self.num_ranks).astype(np.int64)

    def phase_times(self, which: np.ndarray) -> np.ndarray:
        """int64 [R]: time in which each rank has a block in at least one of these launches."""
        kernels = self.slices[which]
        ranks, begins, ends = merged(kernels["rank"], kernels["begin_ns"], kernels["end_ns"])
        return np.bincount(ranks, ends - begins, minlength=self.num_ranks).astype(np.int64)

    def enclosing_kernels(self) -> np.ndarray:
        """int64 [n]: the index of the launch that contains each slice; -1: not recorded. A launch contains itself."""
        kernels = np.flatnonzero(self.kernels())
        warps, begins = self.warps(), self.slices["begin_ns"]
        found = last_before(warps[kernels], begins[kernels], warps, begins)
        kernel = np.where(found >= 0, kernels[found] if len(kernels) else -1, -1)
        return np.where((kernel >= 0) & (self.slices["end_ns"][kernel] >= self.slices["end_ns"]), kernel, -1)


def ranks_of_warps(warps: np.ndarray) -> np.ndarray:
    return ranks_of_blocks(blocks_of_warps(warps))


def blocks_of_warps(warps: np.ndarray) -> np.ndarray:
    return warps >> WARP_BITS


def ranks_of_blocks(blocks: np.ndarray) -> np.ndarray:
    return blocks >> BLOCK_BITS


def merged(groups, begins, ends) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The union of the intervals of each group, as disjoint intervals: their groups, begins and ends. Threads of a warp
    can wait at the same time; the warp's time is their union."""
    if len(groups) == 0:
        return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64)
    names, group = np.unique(groups, return_inverse=True)
    # Lay the groups end to end on one line, so that one running maximum serves all.
    first = begins.min()
    shift = group.astype(np.int64) * (ends.max() - first + 2) - first
    order = np.argsort(begins + shift, kind="stable")
    starts, reach = (begins + shift)[order], np.maximum.accumulate((ends + shift)[order])
    head = np.flatnonzero(np.concatenate([[True], starts[1:] > reach[:-1]]))
    tail = np.append(head[1:] - 1, len(order) - 1)
    shift = shift[order][head]
    return names[group[order][head]], starts[head] - shift, reach[tail] - shift


def last_before(keys, times, query_keys, query_times) -> np.ndarray:
    """For each query, the index of the last entry with its key at or before its time, int64; -1: none."""
    num_entries = len(keys)
    all_keys = np.concatenate([keys, query_keys])
    is_query = np.arange(len(all_keys)) >= num_entries
    order = np.lexsort((is_query, np.concatenate([times, query_times]), all_keys))
    place = np.maximum.accumulate(np.where(is_query[order], -1, np.arange(len(order))))
    found = np.where(place >= 0, order[place], -1)
    found = np.where((found >= 0) & (all_keys[found] == all_keys[order]), found, -1)
    result = np.empty(len(all_keys), np.int64)
    result[order] = found
    return result[num_entries:]


def busy(begins: np.ndarray, ends: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The mean number of intervals that cover each bin."""
    times = np.concatenate([begins, ends])
    steps = np.concatenate([np.ones(len(begins)), -np.ones(len(ends))])
    order = np.argsort(times, kind="stable")
    times, level = times[order], np.cumsum(steps[order])
    area = np.concatenate([[0.0], np.cumsum(level[:-1] * np.diff(times))]) if len(times) else np.zeros(1)
    at_edges = np.interp(edges, times, area) if len(times) else np.zeros(len(edges))
    return np.diff(at_edges) / np.diff(edges)
