"""Merges and prints the ranks' measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moe_a2a.demo.runs import TOLERANCE, RankRun, WholeRun, max_difference
from moe_a2a.demo.shapes import RankTimes, Shape, Traffic


@dataclass
class ModelResult:
    name: str
    difference: float  # largest, over every logit
    span: float  # largest logit
    sequences: list[int]  # of each rank
    tokens_per_expert: np.ndarray  # [num_ranks, num_experts]
    expert_megabytes: list[float]  # held by each rank
    all_expert_megabytes: float

    @property
    def passed(self) -> bool:
        return self.difference <= TOLERANCE  # False for NaN


@dataclass
class ShapeResult:
    label: str
    phases: np.ndarray  # seconds of dispatch, experts, combine
    baseline_phases: np.ndarray
    traffic: Traffic
    equal: bool
    baseline_close: bool

    @property
    def passed(self) -> bool:
        return self.equal and self.baseline_close


def model_result(name: str, runs: Sequence[RankRun], whole: WholeRun) -> ModelResult:
    return ModelResult(
        name=name,
        difference=max_difference(runs, whole.logits),
        span=float(np.abs(whole.logits).max()),
        sequences=[len(run.logits) for run in runs],
        tokens_per_expert=np.stack([run.tokens_per_expert for run in runs]),
        expert_megabytes=[run.expert_bytes / 1e6 for run in runs],
        all_expert_megabytes=whole.expert_bytes / 1e6,
    )


def shape_result(shape: Shape, runs: Sequence[RankTimes]) -> ShapeResult:
    first, *others = (run.traffic for run in runs)
    return ShapeResult(
        label=str(shape),
        phases=_median_step(np.stack([run.seconds for run in runs])),
        baseline_phases=_median_step(np.stack([run.baseline_seconds for run in runs])),
        traffic=sum(others, start=first),
        equal=all(run.equal for run in runs),
        baseline_close=all(run.baseline_close for run in runs),
    )


def _median_step(seconds: np.ndarray) -> np.ndarray:
    """seconds [num_ranks, steps, phases] -> phases of one rank in one step.

    A step takes as long as its slowest rank; of the steps, the median one is shown.
    """
    totals = seconds.sum(axis=2)
    slowest = totals.argmax(axis=0)
    step = totals.max(axis=0).argsort()[totals.shape[1] // 2]
    return seconds[slowest[step], step]


def print_models(results: Sequence[ModelResult]) -> None:
    print(
        f"\n{'model':<12} {'sequences per rank':<19} {'experts':>7} {'expert MB held per rank':<26}"
        f" {'max |logit|':>11} {'max |difference|':>16}  check"
    )
    for r in results:
        held = f"{max(r.expert_megabytes):.1f} of {r.all_expert_megabytes:.1f}"
        sequences = " ".join(map(str, r.sequences))
        print(
            f"{r.name:<12} {sequences:<19} {r.tokens_per_expert.shape[1]:>7} {held:<26}"
            f" {r.span:>11.3f} {r.difference:>16.2e}  {_verdict(r.passed)}"
        )


def print_shapes(results: Sequence[ShapeResult]) -> None:
    print(
        "\nms per step (slowest rank of the median step); baseline: sort + all_to_all_single over gloo;"
        "\nrows that leave a rank in dispatch, MB in dispatch and combine, of all ranks together"
        f"\n\n{'experts/k/hidden/tokens':<23} {'dispatch':>8} {'experts':>8} {'combine':>8}"
        f" {'total':>8} {'baseline':>8} {'faster':>7} {'rows':>6} {'no dedup':>8} {'MB':>7}"
        f" {'no dedup':>8}  check"
    )
    for r in results:
        dispatch, experts, combine = 1e3 * r.phases
        total, baseline = 1e3 * r.phases.sum(), 1e3 * r.baseline_phases.sum()
        t = r.traffic
        check = "bits equal" if r.passed else _why_shape_failed(r)
        print(
            f"{r.label:<23} {dispatch:>8.2f} {experts:>8.2f} {combine:>8.2f} {total:>8.2f}"
            f" {baseline:>8.2f} {baseline / total:>6.1f}x {t.rows:>6} {t.rows_without_dedup:>8}"
            f" {t.megabytes:>7.2f} {t.megabytes_without_dedup:>8.2f}  {check}"
        )


def _why_shape_failed(result: ShapeResult) -> str:
    return "FAILED: " + ("our result differs" if not result.equal else "the baseline's result differs")


def _verdict(passed: bool) -> str:
    return "ok" if passed else "FAILED"
