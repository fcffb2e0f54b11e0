"""Names the rank that the others waited for, and what kept it busy."""

from __future__ import annotations

import numpy as np

from moe_a2a.tracing.hot_expert import ExpertsWork
from moe_a2a.tracing.timeline import CALL_WAIT, CHUNK_WAIT, PARTIAL_WAIT, WAITS, Timeline, merged

NEGLIGIBLE = 0.05  # share of the blocks' time in launches; below it only a hot expert can be to blame
ALONE = 4.0  # times the mean wait for the other ranks that a culprit must reach
LATE = 0.02  # share of the time in launches that waits for a late rank's combine must reach, if there is no culprit


def culprit(timeline: Timeline, cause: np.ndarray, work: ExpertsWork) -> str:
    """A wait for a peer has two parts: before the peer began the launch that ended the wait, and after.

    If the first part dominates, the peer came late; if the second, it was slow to send. If a peer is awaited in combine
    because one of its experts has more work than the others, the expert is to blame, not the peer. We look for such an expert
    even if the waits for all ranks are similar overall, since rows in flight cause most of those, and even if all waits are
    negligible, since products may take most of the blocks' time.
    """
    slices = timeline.slices
    waits = timeline.named(*WAITS) & (slices["peer"] >= 0) & (slices["peer"] != slices["rank"])
    waits &= timeline.enclosing_kernels() >= 0  # drops waits whose launch was not recorded
    share = _share_of_blocks(timeline, waits)
    if share < NEGLIGIBLE:
        return _hot_expert_of_late_rank(timeline, cause, waits, work) or (
            f"No culprit: waits for other ranks are {_percent(share, 1)} of the time in launches."
        )
    waited = _WaitedTime(timeline, waits)
    by_peer = waited.by_peer(waits)
    blamed = int(by_peer.argmax())
    if not _is_alone(by_peer, blamed):
        return _hot_expert_of_late_rank(timeline, cause, waits, work) or (
            f"No single culprit: waits are {_percent(share, 1)} of the time in launches, and "
            f"{_percent(by_peer[blamed], by_peer.sum())} of them, the largest part, are for rank {blamed}."
        )
    of_blamed = waits & (slices["peer"] == blamed)
    before, after = _parts(timeline, cause, of_blamed, waited)
    in_combine = waited.by_peer(of_blamed & timeline.named(PARTIAL_WAIT))[blamed] > by_peer[blamed] / 2
    whom = (
        f"The others waited {_ms(by_peer[blamed])} for rank {blamed} (of {_ms(by_peer.sum())} for all ranks, "
        f"{_percent(share, 1)} of the time in launches)"
    )
    if in_combine and (hot := work.explanation(blamed)):
        return f"{hot} {whom}, in combine."
    if before + after == 0:
        return f"{whom}; what it did meanwhile was not recorded."
    if collective := _collective(timeline, of_blamed, waited):
        step, why_late = collective, "it is slow before the call"
    elif in_combine:
        step, why_late = "combine", "its experts are slow"
    else:
        step, why_late = "dispatch", "it is slow before the layer"
    if before >= after:
        part = f"{_percent(before, before + after)} of that before it began"
        return f"Rank {blamed} comes late to {step}: {why_late}. {whom}; {part}."
    part = f"{_percent(after, before + after)} of that while it was sending"
    return f"Rank {blamed} sends last in {step}. {whom}; {part}."


def _is_alone(by_peer: np.ndarray, blamed: int) -> bool:
    return bool(by_peer[blamed] * (len(by_peer) - 1) >= ALONE * (by_peer.sum() - by_peer[blamed]))


def _hot_expert_of_late_rank(timeline: Timeline, cause: np.ndarray, waits: np.ndarray, work: ExpertsWork) -> str | None:
    """Looks only at waits in combine, and only at the time before the awaited rank began: rows in flight do not count."""
    waits, begin, started, _ = _split_at_launch(timeline, cause, waits & timeline.named(PARTIAL_WAIT))
    is_early = started > begin
    waiter, peer = (timeline.slices[name][waits[is_early]].astype(np.int64) for name in ("rank", "peer"))
    pairs, begins, ends = merged(waiter * timeline.num_ranks + peer, begin[is_early], started[is_early])
    before = np.bincount(pairs % timeline.num_ranks, ends - begins, minlength=timeline.num_ranks)
    late, in_launches = int(before.argmax()), timeline.phase_times(timeline.kernels()).sum()
    if before[late] < LATE * in_launches or not _is_alone(before, late) or (hot := work.explanation(late)) is None:
        return None
    return (
        f"{hot} The others waited {_ms(before[late])} for rank {late} to begin its combine "
        f"({_percent(before[late], in_launches)} of the time in launches)."
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
        """Waiter, peer, start and end of the times in which one rank waits for another."""
        pairs = self._slices["rank"][waits].astype(np.int64) * self._num_ranks + self._slices["peer"][waits]
        pairs, begins, ends = merged(pairs, begins, ends)
        return pairs // self._num_ranks, pairs % self._num_ranks, begins, ends


def _share_of_blocks(timeline: Timeline, waits: np.ndarray) -> float:
    """The share of the blocks' time in launches in which a thread of the block waits; the other threads are then often at
    the block's barrier."""

    def covered(which: np.ndarray) -> int:
        _, begins, ends = merged(
            timeline.blocks()[which], timeline.slices["begin_ns"][which], timeline.slices["end_ns"][which]
        )
        return int((ends - begins).sum())

    return covered(waits) / max(covered(timeline.kernels()), 1)


def _parts(timeline: Timeline, cause: np.ndarray, waits: np.ndarray, waited: _WaitedTime) -> tuple[float, float]:
    """Nanoseconds before and after the start of the peer's launch, over the waits whose cause is known."""
    waits, begin, started, end = _split_at_launch(timeline, cause, waits)
    return waited.by_peer(waits, begin, started).sum(), waited.by_peer(waits, started, end).sum()


def _split_at_launch(timeline: Timeline, cause: np.ndarray, waits: np.ndarray) -> tuple[np.ndarray, ...]:
    """The waits whose cause is known: their indices and start times, when the peer's launch began, their ends."""
    waits = np.flatnonzero(waits & (cause >= 0))
    kernel = timeline.enclosing_kernels()[cause[waits]]
    waits, kernel = waits[kernel >= 0], kernel[kernel >= 0]
    begin, end = timeline.slices["begin_ns"][waits], timeline.slices["end_ns"][waits]
    return waits, begin, np.clip(timeline.slices["begin_ns"][kernel], begin, end), end


def _collective(timeline: Timeline, waits: np.ndarray, waited: _WaitedTime) -> str | None:
    """The launches that contain most of these waits, if those are collectives."""
    of_collectives = waits & timeline.named(CALL_WAIT, CHUNK_WAIT)
    if waited.by_peer(of_collectives).sum() <= waited.by_peer(waits & ~of_collectives).sum():
        return None
    name = timeline.slices["name"][timeline.enclosing_kernels()]
    cost = {
        number: waited.by_peer(of_collectives & (name == number)).sum() for number in np.unique(name[of_collectives])
    }
    return timeline.names[max(cost, key=lambda number: cost[number])]


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.3f} ms"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / max(whole, 1):.1f} %"
