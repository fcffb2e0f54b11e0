"""Merges the records of all ranks into one timeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from moe_a2a.tracing import arrows, clocks
from moe_a2a.tracing.records import KERNEL, Columns, RankRecords, decode
from moe_a2a.tracing.timeline import MOMENTS, PARTIAL_WAIT, ROW_WAIT, SEND, SIGNAL, SLICE, SUM, TILE, Timeline

FORMAT = "moe_a2a trace 1"
# Slices that carry or await one row: their `bytes` is the size of the row.
ROW_NAMES = (SEND, SUM, SIGNAL, ROW_WAIT, PARTIAL_WAIT)


def merge(ranks: Sequence[RankRecords], configuration: dict[str, Any], combine_row_bytes: int) -> Timeline:
    """configuration: of the ExpertParallel, for `about`; combine_row_bytes: of one row of `hidden` values of its
    dtype."""
    columns = [decode(r) for r in ranks]
    times, rank_clocks = clocks.align(ranks, columns)
    names, numbers = _names(ranks)
    num_local_experts = configuration.get("num_experts", 0) // configuration["num_ranks"]
    slices = np.concatenate([_slices(r, c, numbers, num_local_experts) for r, c in zip(ranks, columns, strict=True)])
    timeline = Timeline(slices, np.empty(0, dtype=arrows.ARROW), names, {"operations": list(ranks[0].operations)})
    slices["instant"][timeline.named(*MOMENTS)] = 1

    exact = np.concatenate(times, axis=1)  # including fractions of a nanosecond
    _set_times(slices, exact)
    if len(ranks) == configuration["num_ranks"]:  # otherwise one rank after an exception: no peer to point at
        has_drops = np.array([r.segment_dropped.sum() > 0 for r in ranks])
        timeline.arrows = arrows.match(timeline, np.array([c.error_ns for c in rank_clocks]), has_drops)
        move = _causal_move(timeline, exact, rank_clocks, max(clock_step_ns(r) for r in ranks))
        if move is not None:
            exact += move[slices["rank"]]
            _set_times(slices, exact)
    latency = slices["end_ns"][timeline.arrows["sink"]] - slices["begin_ns"][timeline.arrows["source"]]
    _set_bytes(timeline, ranks, combine_row_bytes)
    num_implied = [c.num_implied for c in columns]
    timeline.about |= _about(ranks, rank_clocks, num_implied, configuration, timeline, latency)
    return timeline


def clock_step_ns(rank: RankRecords) -> float:
    return 1e9 * rank.clock_step_ticks / rank.ticks_per_second


def _names(ranks: Sequence[RankRecords]) -> tuple[list[str], dict[str, int]]:
    names = list(dict.fromkeys(name for r in ranks for name in [*r.kinds, *r.operations]))
    return names, {name: number for number, name in enumerate(names)}


def _slices(rank: RankRecords, columns: Columns, numbers: dict[str, int], num_local_experts: int) -> np.ndarray:
    """All columns except the times. A launch is named after its operation; an unknown kind keeps its name. The record of a
    tile holds its local expert in place of the token, and its rows in place of the polls."""
    slices = np.full(len(columns.kind), -1, SLICE)
    kinds = [numbers[name] for name in rank.kinds]
    operations = [numbers[name] for name in rank.operations]
    is_kernel = columns.kind == rank.kinds.index(KERNEL)
    slices["rank"] = rank.rank
    slices["block"], slices["warp"] = np.divmod(columns.segment, rank.warps_per_block)
    slices["name"] = np.take(kinds, columns.kind)
    slices["name"][is_kernel] = np.take(operations, columns.token[is_kernel])
    slices["peer"] = columns.peer
    slices["token"] = np.where(is_kernel, -1, columns.token)
    slices["polls"] = np.where(columns.polls > 0, columns.polls, -1)
    is_tile = slices["name"] == numbers.get(TILE, -1)
    slices["expert"][is_tile] = rank.rank * num_local_experts + slices["token"][is_tile]
    slices["rows"][is_tile] = slices["polls"][is_tile]
    for name in ("token", "polls"):
        slices[name][is_tile] = -1
    slices["instant"] = 0
    return slices


def _set_times(slices: np.ndarray, exact: np.ndarray) -> None:
    """Whole nanoseconds since the first record. Rounding down preserves nesting."""
    first = exact[0].min() if exact.size else 0.0
    slices["begin_ns"], slices["end_ns"] = np.floor(exact - first)


def _set_bytes(timeline: Timeline, ranks: Sequence[RankRecords], combine_row_bytes: int) -> None:
    slices, kernel = timeline.slices, timeline.enclosing_kernels()
    carries_a_row = timeline.named(*ROW_NAMES)
    in_dispatch = timeline.named("dispatch", "dispatch_send", "dispatch_recv")[kernel] & (kernel >= 0)
    slices["bytes"][carries_a_row] = combine_row_bytes
    sender = np.where(timeline.named(PARTIAL_WAIT), slices["peer"], slices["rank"])
    crosses_a_link = slices["rank"] != slices["peer"]
    for r in ranks:
        slices["bytes"][carries_a_row & in_dispatch & (slices["rank"] == r.rank)] = r.dispatch_row_bytes
        if r.sum_bytes is not None:
            slices["bytes"][carries_a_row & ~in_dispatch & crosses_a_link & (sender == r.rank)] = r.sum_bytes


def _causal_move(timeline: Timeline, exact: np.ndarray, rank_clocks, step_ns: float) -> np.ndarray | None:
    """The shift of each rank's times that makes every wait end at least two nanoseconds after its signal, since rounding
    down may cost one. If there is none, a wait may end up to one clock step early, the error of either time."""
    source, sink = timeline.arrows["source"], timeline.arrows["sink"]
    src, dst = timeline.slices["rank"][source], timeline.slices["rank"][sink]
    slack = np.full((len(rank_clocks), len(rank_clocks)), np.inf)
    np.minimum.at(slack, (src, dst), exact[1][sink] - exact[0][source])
    for early_ns in (-2.0, step_ns):
        move = clocks.tighten(rank_clocks, slack + early_ns)
        if move is not None:
            return move
    return None


def _about(ranks, rank_clocks, num_implied, configuration, timeline: Timeline, latency: np.ndarray) -> dict[str, Any]:
    errors = np.array([c.error_ns for c in rank_clocks])
    source, sink = timeline.arrows["source"], timeline.arrows["sink"]
    pair_error = errors[timeline.slices["rank"][source]] + errors[timeline.slices["rank"][sink]]
    tokens_per_expert = np.sum([r.tokens_per_expert for r in ranks], axis=0).tolist()
    return {
        "format": FORMAT,
        "configuration": configuration,
        "clock": "nanoseconds of rank 0's clock since the first record",
        "arrows": len(timeline.arrows),
        "arrows_backwards": int((latency < 0).sum()),
        "arrows_backwards_beyond_clock_error": int((latency < -np.ceil(pair_error)).sum()),
        "ranks": [
            {
                "rank": r.rank,
                "records_attempted": int(r.segment_written.sum() + r.segment_dropped.sum()),
                "records_written": int(r.segment_written.sum()),
                "records_dropped": int(r.segment_dropped.sum()),
                "signals_without_record": implied,
                "clock_error_ns": round(float(c.error_ns), 1),
                "clock_step_ns": round(clock_step_ns(r), 3),
                "clock_offset_ns": round(float(c.offset_ns), 1),
                "clock_drift_ns": round(float(c.drift_ns), 1),
            }
            for r, c, implied in zip(ranks, rank_clocks, num_implied, strict=True)
        ],
        # Omitted without experts: Perfetto's format has no empty array.
        **({"tokens_per_expert": tokens_per_expert} if tokens_per_expert else {}),
    }
