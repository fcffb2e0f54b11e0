"""A rank at a glance: its phases on one track, and the share of its warps that wait as a counter."""

from __future__ import annotations

import numpy as np

from moe_a2a.tracing.timeline import SAMPLE, SLICE, WAITS, Timeline, busy, merged

OVERVIEW_BLOCK = -1  # of the slices that are phases
WAITING = "% of the warps that wait"
MAX_SAMPLES = 2000  # per counter: a denser line looks like a band, and slows the UI


def phases(timeline: Timeline) -> np.ndarray:
    """Slices of SLICE in the block OVERVIEW_BLOCK: the times in which a rank has a block in a launch, or in a role of one."""
    kernels = timeline.slices[timeline.kernels()]
    found = []
    for name in np.unique(kernels["name"]):
        own = kernels[kernels["name"] == name]
        ranks, begins, ends = merged(own["rank"], own["begin_ns"], own["end_ns"])
        slices = np.full(len(ranks), -1, SLICE)
        slices["rank"], slices["begin_ns"], slices["end_ns"], slices["name"] = ranks, begins, ends, name
        slices["block"], slices["warp"], slices["instant"] = OVERVIEW_BLOCK, 0, 0
        found.append(slices)
    return np.concatenate(found) if found else np.empty(0, SLICE)


def waiting_shares(timeline: Timeline, name: int) -> np.ndarray:
    """Samples of SAMPLE, counter `name`: percentage of the warps in launches that wait, averaged until the next
    sample; 0 outside launches."""
    slices = timeline.slices
    if len(slices) == 0:
        return np.empty(0, SAMPLE)
    edges = np.linspace(slices["begin_ns"].min(), slices["end_ns"].max() + 1, MAX_SAMPLES).astype(np.int64)
    edges = np.unique(edges)
    inside = timeline.kernels()
    waits = timeline.named(*WAITS) & (timeline.enclosing_kernels() >= 0)
    lines = [_line(timeline, rank, edges, inside, waits) for rank in np.unique(slices["rank"])]
    samples = np.concatenate(lines)
    samples["name"] = name
    return samples


def _line(timeline: Timeline, rank: int, edges: np.ndarray, inside: np.ndarray, waits: np.ndarray) -> np.ndarray:
    own = timeline.slices["rank"] == rank
    in_launches, in_waits = (_warps(timeline, own & which, edges) for which in (inside, waits))
    share = np.rint(100 * in_waits / np.maximum(in_launches, 1e-12)).astype(np.int64)
    share = np.append(np.clip(share, 0, 100), 0)  # the last sample ends the line
    changes = np.flatnonzero(np.diff(share, prepend=-1))
    line = np.empty(len(changes), SAMPLE)
    line["time_ns"], line["value"], line["rank"] = edges[changes], share[changes], rank
    return line


def _warps(timeline: Timeline, which: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The mean number of warps in one of these slices, between adjacent edges."""
    slices = timeline.slices[which]
    _, begins, ends = merged(timeline.warps()[which], slices["begin_ns"], slices["end_ns"])
    return busy(begins, ends, edges)
