"""A trace in numbers: who took how long, who waited for whom, and whose fault it was."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_a2a.tracing.arrows import causes
from moe_a2a.tracing.blame import culprit
from moe_a2a.tracing.critical_path import PathStep, critical_path
from moe_a2a.tracing.timeline import DISPATCH_SENDERS, SIGNAL, WAITS, Timeline


@dataclass
class Summary:
    """Times in nanoseconds. R ranks.

    operation_ns: per operation, [R] time in which at least one of the rank's blocks was in it, and how many launches.
    kind_share: per kind of slice, [R] its part of the time that the rank's warps were in launches.
    wait_sum, wait_max: [R waiter, R awaited] over all waits of all warps.
    tokens: [R from, R to] rows that dispatches sent; tokens_per_expert: [E] choices, empty where they were not counted.
    block_imbalance: [R] time not waiting, of the busiest block over the mean of all.
    path: the critical path, back from the last thing that happened, latest step first.
    culprit: one sentence, or more than one.
    """

    about: dict
    span_ns: int
    operation_ns: dict[str, tuple[np.ndarray, np.ndarray]]
    kind_share: dict[str, np.ndarray]
    wait_sum: np.ndarray
    wait_max: np.ndarray
    tokens: np.ndarray
    tokens_per_expert: np.ndarray
    block_imbalance: np.ndarray
    path: list[PathStep]
    culprit: str

    @property
    def wait_share(self) -> np.ndarray:
        """[R] part of the time in launches that the rank's warps waited."""
        return sum((share for kind, share in self.kind_share.items() if kind in WAITS), np.zeros(len(self.wait_sum)))

    def __str__(self) -> str:
        from moe_a2a.tracing.report import text_of

        return text_of(self)


def summarize(timeline: Timeline) -> Summary:
    slices = timeline.slices
    if len(slices) == 0:
        raise RuntimeError("the trace is empty: no kernel ran inside its block")
    cause = causes(timeline)
    wait_sum, wait_max = _wait_matrices(timeline)
    tokens = _tokens(timeline)
    tokens_per_expert = np.array(timeline.about.get("tokens_per_expert", []), dtype=np.int64)
    return Summary(
        about=timeline.about,
        span_ns=int(slices["end_ns"].max() - slices["begin_ns"].min()),
        operation_ns=_operation_times(timeline),
        kind_share=_kind_shares(timeline),
        wait_sum=wait_sum,
        wait_max=wait_max,
        tokens=tokens,
        tokens_per_expert=tokens_per_expert,
        block_imbalance=_block_imbalance(timeline),
        path=critical_path(timeline, cause),
        culprit=culprit(timeline, cause, tokens, tokens_per_expert),
    )


def _operation_times(timeline: Timeline) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Per operation [R] covered time and [R] launches: those of a rank's blocks that overlap are one."""
    kernels = timeline.slices[timeline.kernels()]
    times = {}
    for number in np.unique(kernels["name"]):
        covered, launches = np.zeros(timeline.num_ranks, np.int64), np.zeros(timeline.num_ranks, np.int64)
        for rank in range(timeline.num_ranks):
            own = kernels[(kernels["name"] == number) & (kernels["rank"] == rank)]
            covered[rank], launches[rank] = _union(own["begin_ns"], own["end_ns"])
        times[timeline.names[number]] = (covered, launches)
    return times


def _union(begins: np.ndarray, ends: np.ndarray) -> tuple[int, int]:
    """Length of the union of intervals, and of how many pieces it is."""
    if len(begins) == 0:
        return 0, 0
    order = np.argsort(begins, kind="stable")
    begins, reach = begins[order], np.maximum.accumulate(ends[order])
    starts = np.flatnonzero(np.concatenate([[True], begins[1:] > reach[:-1]]))
    stops = np.concatenate([starts[1:] - 1, [len(begins) - 1]])
    return int((reach[stops] - begins[starts]).sum()), len(starts)


def _kind_shares(timeline: Timeline) -> dict[str, np.ndarray]:
    slices, is_kernel = timeline.slices, timeline.kernels()
    durations = timeline.durations()
    in_launches = np.bincount(slices["rank"][is_kernel], durations[is_kernel], minlength=timeline.num_ranks)
    in_a_launch = ~is_kernel & (slices["instant"] == 0) & (timeline.enclosing_kernels() >= 0)
    shares = {}
    for number in np.unique(slices["name"][in_a_launch]):
        pick = in_a_launch & (slices["name"] == number)
        total = np.bincount(slices["rank"][pick], durations[pick], minlength=timeline.num_ranks)
        shares[timeline.names[number]] = total / np.maximum(in_launches, 1)
    return dict(sorted(shares.items(), key=lambda item: -item[1].max()))


def _wait_matrices(timeline: Timeline) -> tuple[np.ndarray, np.ndarray]:
    waits = timeline.named(*WAITS) & (timeline.slices["peer"] >= 0)
    where = (timeline.slices["rank"][waits], timeline.slices["peer"][waits])
    total = np.zeros((timeline.num_ranks, timeline.num_ranks), np.int64)
    longest = total.copy()
    np.add.at(total, where, timeline.durations()[waits])
    np.maximum.at(longest, where, timeline.durations()[waits])
    return total, longest


def _tokens(timeline: Timeline) -> np.ndarray:
    kernel = timeline.enclosing_kernels()
    senders = [i for i, name in enumerate(timeline.names) if name in DISPATCH_SENDERS]
    sent = timeline.named(SIGNAL) & (kernel >= 0) & np.isin(timeline.slices["name"][kernel], senders)
    tokens = np.zeros((timeline.num_ranks, timeline.num_ranks), np.int64)
    np.add.at(tokens, (timeline.slices["rank"][sent], timeline.slices["peer"][sent]), 1)
    return tokens


def _block_imbalance(timeline: Timeline) -> np.ndarray:
    slices, is_kernel = timeline.slices, timeline.kernels()
    is_wait = timeline.named(*WAITS)
    work = np.where(is_kernel, timeline.durations(), 0) - np.where(is_wait, timeline.durations(), 0)
    imbalance = np.ones(timeline.num_ranks)
    for rank in range(timeline.num_ranks):
        own = slices["rank"] == rank
        blocks = slices["block"][own & is_kernel]
        if len(blocks) == 0:
            continue
        per_block = np.bincount(slices["block"][own], work[own])[np.unique(blocks)]
        imbalance[rank] = per_block.max() / max(per_block.mean(), 1.0)
    return imbalance
