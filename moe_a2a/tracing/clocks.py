"""One clock for all ranks: rank 0's.

Ranks exchange clock readings over the heap at the beginning and at the end of a trace. Of many exchanges the fastest is
used; its offset is accurate to half its round trip. Each pair of ranks yields such an interval. Together they are difference
constraints, and shortest paths over the ranks give the tightest bounds. Between the two meetings the offset is interpolated
linearly: GPU clocks drift by some parts per million, which is microseconds over the second that may pass between a meeting
and the first record.

Causality gives a second bound for free: no wait ends before the signal that it waited for (tighten()).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moe_a2a.tracing.records import Columns, RankRecords, wrapped


@dataclass
class Clock:
    """Converts a rank's ticks to nanoseconds of rank 0's clock."""

    offset_ns: float  # at the beginning: this clock's reading minus rank 0's
    drift_ns: float  # growth of the offset between the two meetings
    error_ns: float  # bound of the error of the offset, +-


def align(ranks: Sequence[RankRecords], columns: Sequence[Columns]) -> tuple[list[np.ndarray], list[Clock]]:
    """begin_ns and end_ns of each rank's records, float64 [2, n], since rank 0's first record began; and the clocks."""
    num_ranks = len(ranks)
    ns_per_tick = np.array([1e9 / r.ticks_per_second for r in ranks])
    step_ns = np.array([r.clock_step_ticks for r in ranks]) * ns_per_tick
    # The clocks' zeros may be years apart: subtract the large part as integers, so that floats hold the rest.
    coarse = [int(ranks[0].clocks[0].offsets[r]) if num_ranks > 1 else 0 for r in range(num_ranks)]
    bounds = [_bounds_of_meeting([r.clocks[m] for r in ranks], coarse, ns_per_tick) for m in (0, -1)]
    (start, start_error), (end, end_error) = (_middle(b) for b in bounds)
    times, clocks = [], []
    for r, c in enumerate(columns):
        zero = wrapped(c.first_tick - coarse[r] - columns[0].first_tick) * ns_per_tick[r]
        begin = zero + c.begin * ns_per_tick[r]
        stop = zero + (c.begin + c.duration) * ns_per_tick[r]
        drift = end[r] - start[r]
        first, last = (zero + wrapped(ranks[r].clocks[m].at - c.first_tick) * ns_per_tick[r] for m in (0, -1))
        span = max(last - first, 1.0)
        times.append(np.stack([t - start[r] - drift * (t - first) / span for t in (begin, stop)]))
        error = max(start_error[r], end_error[r]) + (step_ns[r] + step_ns[0] if r else 0.0)
        clocks.append(Clock(coarse[r] * ns_per_tick[r] + start[r], drift, error))
    return times, clocks


def tighten(clocks: Sequence[Clock], slack_ns: np.ndarray) -> np.ndarray | None:
    """Shifts the clocks within their errors so that every signal precedes the end of its wait.

    slack_ns: [R src, R dst], the least time from a signal of src to the end of its wait on dst; inf: no such pair.
    Returns the shift of each rank's times, [R], and reduces the errors; None if no shift satisfies all pairs.
    """
    errors = np.array([c.error_ns for c in clocks])
    bound = slack_ns.T.copy()  # [a, b]: upper bound of b's shift minus a's
    bound[0, :] = np.minimum(bound[0, :], errors)
    bound[:, 0] = np.minimum(bound[:, 0], errors)
    np.fill_diagonal(bound, 0)
    bound = _shortest_paths(bound)
    if (np.diag(bound) < 0).any():
        return None
    middle, half = _middle(bound)
    for clock, error in zip(clocks, half, strict=True):
        clock.error_ns = error
    return middle


def _bounds_of_meeting(samples, coarse: list[int], ns_per_tick: np.ndarray) -> np.ndarray:
    """[a, b]: upper bound in ns of b's clock minus a's, both without their coarse offsets."""
    num_ranks = len(samples)
    bound = np.full((num_ranks, num_ranks), np.inf)
    np.fill_diagonal(bound, 0)
    for a, sample in enumerate(samples):
        for b in range(num_ranks):
            if a == b:
                continue
            ahead = wrapped(int(sample.offsets[b]) - coarse[b] + coarse[a]) * ns_per_tick[a]
            half = float(sample.round_trips[b]) * ns_per_tick[a] / 2
            bound[a, b] = min(bound[a, b], ahead + half)
            bound[b, a] = min(bound[b, a], half - ahead)
    while True:
        tightest = _shortest_paths(bound)
        worst = np.diag(tightest).min()
        if worst >= 0:
            return tightest
        bound += -worst  # clocks drifted between the exchanges of different pairs: widen all bounds
        np.fill_diagonal(bound, 0)


def _shortest_paths(bound: np.ndarray) -> np.ndarray:
    """The tightest bounds that follow from all of these (Floyd and Warshall's algorithm)."""
    bound = bound.copy()
    for via in range(len(bound)):
        bound = np.minimum(bound, bound[:, via, None] + bound[None, via, :])
    return bound


def _middle(bound: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The midpoint and half-width of each value's range relative to the first value. Midpoints satisfy every bound that
    the ends of the ranges satisfy."""
    return (bound[0] - bound[:, 0]) / 2, (bound[0] + bound[:, 0]) / 2
