"""Names the rank that the others waited for, and what it was doing meanwhile."""

from __future__ import annotations

import numpy as np

from moe_a2a.tracing.timeline import CALL_WAIT, CHUNK_WAIT, PARTIAL_WAIT, WAITS, Timeline, merged

NEGLIGIBLE = 0.05  # share of the time in launches; below it there is no culprit
ALONE = 4.0  # times the mean wait for the other ranks that a culprit must reach
HOT = 2.0  # times its even share of the choices that makes an expert hot
UNEVEN = 1.5  # times the mean of received rows or choices that counts as more work


def culprit(timeline: Timeline, cause: np.ndarray, tokens: np.ndarray, tokens_per_expert: np.ndarray) -> str:
    """A wait for a peer has two parts: before the peer began the launch that ended the wait, and after.

    If the first part dominates, the peer came late; if the second, it was slow to send. A peer that is awaited in combine
    and received more rows than the others is not to blame: its experts are.
    """
    slices = timeline.slices
    waits = timeline.named(*WAITS) & (slices["peer"] >= 0) & (slices["peer"] != slices["rank"])
    waits &= timeline.enclosing_kernels() >= 0  # the launch of the others was dropped
    share = _share_of_blocks(timeline, waits)
    if share < NEGLIGIBLE:
        return f"No culprit: waits for other ranks are {_percent(share, 1)} of the time in launches."
    waited = _WaitedTime(timeline, waits)
    by_peer = waited.by_peer(waits)
    blamed = int(by_peer.argmax())
    if by_peer[blamed] * (timeline.num_ranks - 1) < ALONE * (by_peer.sum() - by_peer[blamed]):
        return (
            f"No single culprit: waits are {_percent(share, 1)} of the time in launches, most of "
            f"them, {_percent(by_peer[blamed], by_peer.sum())}, for rank {blamed}."
        )
    of_blamed = waits & (slices["peer"] == blamed)
    before, after = _parts(timeline, cause, of_blamed, waited)
    in_combine = waited.by_peer(of_blamed & timeline.named(PARTIAL_WAIT))[blamed] > by_peer[blamed] / 2
    whom = (
        f"The others waited {_ms(by_peer[blamed])} for rank {blamed} (of {_ms(by_peer.sum())} for all ranks, "
        f"{_percent(share, 1)} of the time in launches)"
    )
    if in_combine and (hot := _hot_expert(tokens, tokens_per_expert, blamed)):
        return f"{hot} {whom}, in combine."
    if before + after == 0:
        return f"{whom}; what it did meanwhile was not recorded."
    collective = _collective(timeline, of_blamed, waited)
    if collective and before >= after:
        return (
            f"Rank {blamed} comes late to {collective}: it is slow before the call. {whom}; {_percent(before, before + after)} of that "
            "before it began."
        )
    if collective:
        return f"Rank {blamed} sends last in {collective}. {whom}; {_percent(after, before + after)} of that while it was sending."
    if before >= after:
        step = "combine: its experts are slow" if in_combine else "dispatch: it is slow before the layer"
        return (
            f"Rank {blamed} comes late to {step}. {whom}; {_percent(before, before + after)} of that before it began."
        )
    step = "combine" if in_combine else "dispatch"
    return (
        f"Rank {blamed} sends last in {step}. {whom}; {_percent(after, before + after)} of that while it was sending."
    )


class _WaitedTime:
    """What waiting for a peer costs the other ranks: wall time in which a rank waits, split evenly over all peers that it
    waits for at that moment, however many threads wait.

    A sum over threads would hide one step behind the other: one thread per block waits for a late rank's table, thousands
    wait for sums at once.
    """

    def __init__(self, timeline: Timeline, waits: np.ndarray):
        self._slices, self._num_ranks = timeline.slices, timeline.num_ranks
        waiter, _, begins, ends = self._unions(waits, self._slices["begin_ns"][waits], self._slices["end_ns"][waits])
        # Per waiting rank: moments, and the time charged to one awaited peer up to each.
        self._given = {}
        for rank in np.unique(waiter):
            own = waiter == rank
            moments = np.concatenate([begins[own], ends[own]])
            order = np.argsort(moments, kind="stable")
            awaited = np.cumsum(np.repeat([1, -1], own.sum())[order])[:-1]
            lengths = np.diff(moments[order]) / np.maximum(awaited, 1)
            self._given[rank] = moments[order], np.concatenate([[0.0], np.cumsum(lengths)])

    def by_peer(
        self, waits: np.ndarray, begins: np.ndarray | None = None, ends: np.ndarray | None = None
    ) -> np.ndarray:
        """float64 [R]: nanoseconds of these waits, or of the given parts of them, by awaited rank."""
        begins = self._slices["begin_ns"][waits] if begins is None else begins
        ends = self._slices["end_ns"][waits] if ends is None else ends
        waiter, peer, begins, ends = self._unions(waits, begins, ends)
        cost = np.zeros(len(begins))
        for rank, (moments, given) in self._given.items():
            own = waiter == rank
            cost[own] = np.interp(ends[own], moments, given) - np.interp(begins[own], moments, given)
        return np.bincount(peer, cost, minlength=self._num_ranks)

    def _unions(self, waits, begins, ends) -> tuple[np.ndarray, ...]:
        """Waiter, peer, begin and end of the times in which one rank waits for another."""
        pairs = self._slices["rank"][waits].astype(np.int64) * self._num_ranks + self._slices["peer"][waits]
        pairs, begins, ends = merged(pairs, begins, ends)
        return pairs // self._num_ranks, pairs % self._num_ranks, begins, ends


def _share_of_blocks(timeline: Timeline, waits: np.ndarray) -> float:
    """The share of the blocks' time in launches in which a thread of the block waits; the other threads are then often at
    the block's barrier."""

    def covered(which: np.ndarray) -> int:
        _, begins, ends = merged(
            timeline.warps()[which] >> 16, timeline.slices["begin_ns"][which], timeline.slices["end_ns"][which]
        )
        return int((ends - begins).sum())

    return covered(waits) / max(covered(timeline.kernels()), 1)


def _parts(timeline: Timeline, cause: np.ndarray, waits: np.ndarray, waited: _WaitedTime) -> tuple[float, float]:
    """Nanoseconds before and after the begin of the peer's launch, over the waits whose cause is known."""
    waits = np.flatnonzero(waits & (cause >= 0))
    kernel = timeline.enclosing_kernels()[cause[waits]]
    waits, kernel = waits[kernel >= 0], kernel[kernel >= 0]
    begin, end = timeline.slices["begin_ns"][waits], timeline.slices["end_ns"][waits]
    started = np.clip(timeline.slices["begin_ns"][kernel], begin, end)
    return waited.by_peer(waits, begin, started).sum(), waited.by_peer(waits, started, end).sum()


def _collective(timeline: Timeline, waits: np.ndarray, waited: _WaitedTime) -> str | None:
    """The launches in which most of these waits lie, if those are collectives."""
    of_collectives = waits & timeline.named(CALL_WAIT, CHUNK_WAIT)
    if waited.by_peer(of_collectives).sum() <= waited.by_peer(waits & ~of_collectives).sum():
        return None
    name = timeline.slices["name"][timeline.enclosing_kernels()]
    cost = {
        number: waited.by_peer(of_collectives & (name == number)).sum() for number in np.unique(name[of_collectives])
    }
    return timeline.names[max(cost, key=lambda number: cost[number])]


def _hot_expert(tokens: np.ndarray, tokens_per_expert: np.ndarray, rank: int) -> str | None:
    received = tokens.sum(axis=0)
    if received.sum() == 0:
        return None
    # A row for several experts of a rank arrives once, but each of them works on it.
    per_rank = len(tokens_per_expert) // len(tokens)
    own = tokens_per_expert[rank * per_rank : (rank + 1) * per_rank]
    rows, choices = received[rank] / received.mean(), own.sum() * len(tokens) / max(tokens_per_expert.sum(), 1)
    if max(rows, choices) < UNEVEN:
        return None
    rows = f"rank {rank} receives {rows:.1f} times the mean number of rows"
    if tokens_per_expert.sum() == 0:
        return f"The routing is uneven: {rows}."
    hot = int(own.argmax())
    if own[hot] < HOT * tokens_per_expert.mean():
        return f"The routing is uneven: {rows}, none of its experts alone."
    share = _percent(own[hot], tokens_per_expert.sum())
    even = _percent(1, len(tokens_per_expert))
    return (
        f"Expert {rank * per_rank + hot} on rank {rank} is hot: {share} of all choices ({even} would be even), {rows}."
    )


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.3f} ms"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / max(whole, 1):.1f} %"
