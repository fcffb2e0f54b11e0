"""The counter tracks: bytes in flight, and tokens being waited for."""

from __future__ import annotations

import numpy as np

from moe_a2a.tracing.overview import MAX_SAMPLES, WAITING, waiting_shares
from moe_a2a.tracing.timeline import PARTIAL_WAIT, ROW_WAIT, SAMPLE, SEND, SIGNAL, SUM, Timeline, last_before


def counters(timeline: Timeline) -> tuple[np.ndarray, list[str]]:
    """Samples [n] of SAMPLE, by time, and the counters' names.

    WAITING: see overview.py.
    "tokens waiting": the row_waits and partial_waits of a rank at that time.
    "bytes in flight to rank p": rows and sums that are being sent and not yet signalled to p.
    """
    names = ["tokens waiting"] + [f"bytes in flight to rank {p}" for p in range(timeline.num_ranks)]
    slices = timeline.slices
    waits = slices[timeline.named(ROW_WAIT, PARTIAL_WAIT)]
    signals, begun = _sends_of_signals(timeline)
    lines = []
    for rank in range(timeline.num_ranks):
        own = waits[waits["rank"] == rank]
        lines.append(_line(rank, 0, own["begin_ns"], own["end_ns"], np.ones(len(own), np.int64)))
        for peer in range(timeline.num_ranks):
            pick = (signals["rank"] == rank) & (signals["peer"] == peer)
            lines.append(_line(rank, 1 + peer, begun[pick], signals["end_ns"][pick], signals["bytes"][pick]))
    lines.append(waiting_shares(timeline, len(names)))
    names.append(WAITING)
    samples = np.concatenate(lines)
    return samples[np.argsort(samples["time_ns"], kind="stable")], names


def _sends_of_signals(timeline: Timeline) -> tuple[np.ndarray, np.ndarray]:
    """The signals whose send was recorded, and its begin: the last send of the same warp, launch and token."""
    slices, warps, kernel = timeline.slices, timeline.warps(), timeline.enclosing_kernels()
    sends, signals = np.flatnonzero(timeline.named(SEND, SUM)), np.flatnonzero(timeline.named(SIGNAL))
    # Number the warps densely, so that warp and token fit into one key.
    _, warp = np.unique(np.concatenate([warps[sends], warps[signals]]), return_inverse=True)
    key = (warp << 20) + np.concatenate([slices["token"][sends], slices["token"][signals]])
    last = last_before(key[: len(sends)], slices["begin_ns"][sends], key[len(sends) :], slices["begin_ns"][signals])
    signals, sends = signals[last >= 0], sends[last[last >= 0]]
    same = (kernel[signals] == kernel[sends]) & (slices["bytes"][signals] >= 0)
    return slices[signals[same]], slices["begin_ns"][sends[same]]


def _line(rank: int, name: int, begins: np.ndarray, ends: np.ndarray, amounts: np.ndarray) -> np.ndarray:
    """The sum of the amounts of all open intervals over time. Beyond MAX_SAMPLES, nearby samples are merged into their
    largest value followed by their last."""
    times, where = np.unique(np.concatenate([begins, ends]), return_inverse=True)
    steps = np.bincount(where, np.concatenate([amounts, -amounts]), minlength=len(times))
    values = np.cumsum(steps).astype(np.int64)
    if len(times) > MAX_SAMPLES:
        width = -(-2 * (times[-1] - times[0] + 1) // MAX_SAMPLES)
        _, firsts = np.unique((times - times[0]) // width, return_index=True)
        lasts = np.append(firsts[1:] - 1, len(times) - 1)
        largest = np.maximum.reduceat(values, firsts)
        times = np.stack([times[firsts], times[lasts]], axis=1).reshape(-1)
        values = np.stack([largest, values[lasts]], axis=1).reshape(-1)
    line = np.empty(len(times), SAMPLE)
    line["time_ns"], line["value"], line["rank"], line["name"] = times, values, rank, name
    return line
