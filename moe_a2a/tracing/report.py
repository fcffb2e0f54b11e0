"""The summary of a trace, and its text."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from moe_a2a.tracing.critical_path import PathStep

NUM_PATH_ROWS = 12
WIDTH = 110


@dataclass
class Summary:
    """Times in nanoseconds. R ranks.

    operation_ns: per operation, [R] time in which at least one of the rank's blocks was in it, and [R] launches.
    kind_share: per kind of slice, [R] its share of the rank's warp time in launches; wait_share: [R] the share of waits.
    wait_sum, wait_max: [R waiter, R awaited] over all waits of all threads.
    tokens: [R from, R to] rows sent by dispatches; tokens_per_expert: [E] choices, empty if they were not counted.
    tile_ns: [E] time in tiles of each expert's products, of all blocks together; empty without tiles.
    block_imbalance: [R] time not waiting, of the busiest block over the mean of all.
    path: the critical path, latest step first.
    culprit: a sentence or two.
    """

    about: dict
    span_ns: int
    operation_ns: dict[str, tuple[np.ndarray, np.ndarray]]
    kind_share: dict[str, np.ndarray]
    wait_share: np.ndarray
    wait_sum: np.ndarray
    wait_max: np.ndarray
    tokens: np.ndarray
    tokens_per_expert: np.ndarray
    tile_ns: np.ndarray
    block_imbalance: np.ndarray
    path: list[PathStep]
    culprit: str

    def __str__(self) -> str:
        return text_of(self)


def text_of(summary: Summary) -> str:
    return "\n\n".join(
        part
        for part in (
            _head(summary),
            textwrap.fill(summary.culprit, WIDTH),
            _operations(summary),
            _shares(summary),
            _waits(summary),
            _imbalance(summary),
            _path(summary),
        )
        if part
    )


def _head(summary: Summary) -> str:
    ranks = summary.about["ranks"]
    written, dropped = (sum(r[f"records_{what}"] for r in ranks) for what in ("written", "dropped"))
    error = max(r["clock_error_ns"] for r in ranks)
    lines = [
        f"{len(ranks)} ranks, {_us(summary.span_ns)} us, {written} records, {dropped} dropped; clocks agree to "
        f"+-{error / 1e3:.3f} us; {summary.about['arrows']} arrows, "
        f"{summary.about['arrows_backwards_beyond_clock_error']} of them backwards by more than that"
    ]
    if dropped:
        lines.append("Records were dropped: what follows misses them. Pass a larger records_per_segment.")
    return "\n".join(lines)


def _operations(summary: Summary) -> str:
    rows = [
        [name, *(f"{_us(t)} /{n}" for t, n in zip(times, launches, strict=True))]
        for name, (times, launches) in summary.operation_ns.items()
    ]
    return _table("us in each operation /launches", _rank_names(summary), rows)


def _shares(summary: Summary) -> str:
    rows = [[kind, *(f"{100 * s:.1f}" for s in share)] for kind, share in summary.kind_share.items()]
    rows.append(["all waits", *(f"{100 * s:.1f}" for s in summary.wait_share)])
    return _table("% of the warps' time in launches", _rank_names(summary), rows)


def _waits(summary: Summary) -> str:
    rows = [
        [f"rank {r} waits for", *(f"{_us(m)} ({_us(s)})" for m, s in zip(longest, total, strict=True))]
        for r, (longest, total) in enumerate(zip(summary.wait_max, summary.wait_sum, strict=True))
    ]
    return _table("longest wait, us (sum over all threads)", _rank_names(summary), rows)


def _imbalance(summary: Summary) -> str:
    rows = [["busiest block / mean", *(f"{b:.2f}" for b in summary.block_imbalance)]]
    if summary.tokens.any():
        sent, received = summary.tokens.sum(axis=1), summary.tokens.sum(axis=0)
        rows = [["rows sent", *map(str, sent)], ["rows received", *map(str, received)], *rows]
    text = _table("balance", _rank_names(summary), rows)
    counts = summary.tokens_per_expert
    if counts.sum() > 0:
        text += f"\nexperts by share of choices: {_largest(counts)}"
    if summary.tile_ns.size:
        text += f"\nexperts by time in tiles: {_largest(summary.tile_ns)}"
    return text


def _largest(of_experts: np.ndarray) -> str:
    top = np.argsort(-of_experts, kind="stable")[:5]
    named = ", ".join(f"{e} ({100 * of_experts[e] / of_experts.sum():.1f} %)" for e in top)
    return f"{named}; the busiest has {of_experts.max() / of_experts.mean():.1f} times the mean"


def _path(summary: Summary) -> str:
    """Sums steps by rank, operation and kind."""
    total = sum(step.duration_ns for step in summary.path)
    added: dict[tuple, int] = defaultdict(int)
    for step in summary.path:
        added[step.rank, step.operation, step.kind] += step.duration_ns
    largest = sorted(added.items(), key=lambda item: -item[1])
    rows = [
        [f"rank {rank}", operation, kind, _us(ns), f"{100 * ns / max(total, 1):.1f}"]
        for (rank, operation, kind), ns in largest[:NUM_PATH_ROWS]
    ]
    hops = sum(a.rank != b.rank for a, b in zip(summary.path, summary.path[1:], strict=False))
    title = f"critical path: {_us(total)} us in {len(summary.path)} steps, {hops} times to another rank"
    return _table(title, ["operation", "what", "us", "%"], rows)


def _rank_names(summary: Summary) -> list[str]:
    return [f"rank {r}" for r in range(len(summary.wait_sum))]


def _us(ns: float) -> str:
    return f"{ns / 1e3:.1f}"


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [["", *columns], *rows]
    widths = [max(len(row[c]) for row in cells) for c in range(len(columns) + 1)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(v.rjust(w) for v, w in zip(row[1:], widths[1:], strict=True))])
        for row in cells
    ]
    return "\n".join([title, *lines])
