"""The times of a case, and when there are enough of them, by the public evaluator's rules."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass

LEAST_RUNS, MOST_RUNS = 3, 100
SMALLEST_ERROR = 0.001  # standard error, relative to the mean
MOST_WALL_SECONDS = 120.0


@dataclass(frozen=True)
class Stats:
    """In nanoseconds, as in POPCORN_FD's lines. err: the standard error of the mean."""

    runs: int
    mean: float
    std: float
    err: float
    best: float
    worst: float

    @classmethod
    def of(cls, nanoseconds: list[int]) -> Stats:
        runs = len(nanoseconds)
        std = statistics.stdev(nanoseconds) if runs > 1 else 0.0
        mean = statistics.fmean(nanoseconds)
        return cls(runs, mean, std, std / math.sqrt(runs), min(nanoseconds), max(nanoseconds))

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def enough(nanoseconds: list[int], cap_seconds: float, wall_seconds: float, most_runs: int = MOST_RUNS) -> bool:
    """cap_seconds: limit of the calls' total time; wall_seconds: time passed since the first."""
    if len(nanoseconds) < LEAST_RUNS:
        return False
    stats = Stats.of(nanoseconds)
    is_exact = stats.err < SMALLEST_ERROR * stats.mean
    is_long = stats.mean * stats.runs > cap_seconds * 1e9 or wall_seconds > MOST_WALL_SECONDS
    return is_exact or is_long or stats.runs >= most_runs


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))
