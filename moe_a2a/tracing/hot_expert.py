"""Whether one expert is the reason why its rank's experts take longer than the others'."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_a2a.tracing.timeline import TILE, Timeline, last_before, merged

HOT = 2.0  # times its even share of the choices that makes an expert hot
CHANCE = 4.0  # standard deviations of an even share that chance does not exceed
UNEVEN = 1.5  # times the mean of received rows or choices that counts as more work
MORE_WORK = 1.1  # the same threshold if a hot expert is the reason
IN_PROPORTION = 3.0  # largest ratio of extra time to extra work; beyond it, the work is not the cause

PRODUCTS = ("grouped_gemm", "product_combine_send")
DISPATCH_ENDS = ("dispatch", "dispatch_recv")
COMBINE_BEGINS = ("combine", "combine_send", "product_combine_send")


@dataclass
class ExpertsWork:
    """rows: [R] rows received; choices: [E], empty if they were not counted. Nanoseconds: span_ns [R] from the ends of
    dispatches to the starts of combines, product_ns [R] in products, tile_ns [E] in the tiles of an expert."""

    rows: np.ndarray
    choices: np.ndarray
    span_ns: np.ndarray
    product_ns: np.ndarray
    tile_ns: np.ndarray

    @classmethod
    def of(cls, timeline: Timeline, tokens: np.ndarray, choices: np.ndarray) -> ExpertsWork:
        return cls(
            tokens.sum(axis=0), choices, _spans(timeline), _products(timeline), tile_times(timeline, len(choices))
        )

    def explanation(self, rank: int) -> str | None:
        """A sentence if this rank's experts are slower than the others' because of the routing. It starts with the expert if
        a single one is to blame."""
        if self.rows.sum() == 0:
            return None
        received = self.rows[rank] / self.rows.mean()
        if self.choices.sum() == 0:
            return f"The routing is uneven: {_receives(rank, received)}." if received >= UNEVEN else None
        per_rank = self.choices.reshape(len(self.rows), -1)
        of_ranks, own = per_rank.sum(axis=1), per_rank[rank]
        work = of_ranks[rank] / of_ranks.mean()
        hot = int(own.argmax())
        if not self._work_explains_time(rank, of_ranks):
            return None
        if self._is_hot(own[hot], of_ranks[rank] - of_ranks.mean()) and max(work, received) >= MORE_WORK:
            share, even = (f"{100 * part:.1f} %" for part in (own[hot] / of_ranks.sum(), 1 / self.choices.size))
            return (
                f"Expert {rank * len(own) + hot} on rank {rank} is hot: {share} of all choices ({even} would be even), "
                f"rank {rank} has {work:.1f} times the mean of choices.{self._times(rank, rank * len(own) + hot)}"
            )
        if max(work, received) < UNEVEN:
            return None
        return f"The routing is uneven: {_receives(rank, received)}, none of its experts alone."

    def _is_hot(self, choices: int, more_than_mean: float) -> bool:
        """Far from even, not by chance, and at least half of its rank's excess over the mean."""
        mean = self.choices.mean()
        excess = choices - mean
        return choices >= HOT * mean and excess >= CHANCE * mean**0.5 and 2 * excess >= more_than_mean

    def _work_explains_time(self, rank: int, of_ranks: np.ndarray) -> bool:
        """Whether the extra time of this rank's experts is that of its products, if those were recorded; else whether it is
        in proportion to its choices."""
        others = np.arange(len(of_ranks)) != rank
        if not others.any():
            return True
        span, product = (ns[rank] - np.median(ns[others]) for ns in (self.span_ns, self.product_ns))
        if self.product_ns.any():
            return product > 0 and 2 * product >= span
        more_time = span / max(float(np.median(self.span_ns[others])), 1.0)
        more_work = of_ranks[rank] / max(float(of_ranks[others].mean()), 1.0) - 1
        return bool(more_time <= IN_PROPORTION * max(more_work, 0.0))

    def _times(self, rank: int, expert: int) -> str:
        if self.tile_ns.size == 0 or self.tile_ns.sum() == 0:
            return ""
        of_ranks = self.tile_ns.reshape(len(self.rows), -1).sum(axis=1)
        others = np.delete(self.product_ns, rank)
        share = 100 * self.tile_ns[expert] / max(of_ranks[rank], 1)
        return (
            f" Its tiles are {share:.0f} % of rank {rank}'s products, which take {self.product_ns[rank] / 1e6:.3f} ms; those "
            f"of the others take {others.mean() / 1e6 if len(others) else 0:.3f} ms."
        )


def tile_times(timeline: Timeline, num_experts: int) -> np.ndarray:
    """[E] nanoseconds in tiles of each expert, summed over all blocks; empty without tiles."""
    tiles = timeline.slices[timeline.named(TILE) & (timeline.slices["expert"] >= 0)]
    tiles = tiles[tiles["expert"] < num_experts]
    if len(tiles) == 0:
        return np.empty(0, np.int64)
    times = np.bincount(tiles["expert"], tiles["end_ns"] - tiles["begin_ns"], minlength=num_experts)
    return times.astype(np.int64)


def _products(timeline: Timeline) -> np.ndarray:
    launches = timeline.slices[timeline.kernels() & timeline.named(*PRODUCTS)]
    ranks, begins, ends = merged(launches["rank"], launches["begin_ns"], launches["end_ns"])
    return np.bincount(ranks, ends - begins, minlength=timeline.num_ranks)


def _spans(timeline: Timeline) -> np.ndarray:
    dispatches, combines = (_launches(timeline, names) for names in (DISPATCH_ENDS, COMBINE_BEGINS))
    before = last_before(dispatches[0], dispatches[2], combines[0], combines[1])
    # If several combines follow one dispatch, for example in overlapping halves, the first counts.
    have = before >= 0
    _, first = np.unique(before[have], return_index=True)
    ranks, ends = combines[0][have][first], combines[1][have][first]
    return np.bincount(ranks, ends - dispatches[2][before[have][first]], minlength=timeline.num_ranks)


def _launches(timeline: Timeline, names: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ranks, begins and ends, by rank and begin."""
    own = timeline.slices[timeline.kernels() & timeline.named(*names)]
    return merged(own["rank"], own["begin_ns"], own["end_ns"])


def _receives(rank: int, times: float) -> str:
    return f"rank {rank} receives {times:.1f} times the mean number of rows"
