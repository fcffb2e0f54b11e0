"""Plots of a trace: the wait matrix, and how each rank spent its time."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moe_a2a.files.replaced_files import replaced
from moe_a2a.tracing.summary import summarize
from moe_a2a.tracing.timeline import WAITS, Timeline, busy, merged

ENDINGS = (".png", ".svg", ".pdf", ".jpg")  # the picture formats
NUM_BINS = 400


def save_plot(path: Path, timeline: Timeline) -> str | None:
    """Returns the reason if there is no plot, else None."""
    try:
        import matplotlib

        matplotlib.use("Agg")  # files only: there may be no display
        from matplotlib import pyplot
    except ImportError:
        return "matplotlib is not installed (pip install matplotlib)"

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(15, 5), layout="constrained", width_ratios=(1, 2))
    _draw_waits(figure, left, summarize(timeline).wait_max / 1e3)
    _draw_ranks(right, timeline)
    with replaced(path) as file:
        figure.savefig(file, format=path.suffix[1:].lower() or None, dpi=110)
    pyplot.close(figure)
    return None


def _draw_waits(figure, axes, microseconds: np.ndarray) -> None:
    num_ranks = len(microseconds)
    image = axes.imshow(microseconds, cmap="YlOrRd", vmin=0)
    figure.colorbar(image, ax=axes, label="us")
    threshold = microseconds.max() * 0.6
    for (waiter, awaited), value in np.ndenumerate(microseconds):
        colour = "white" if value > threshold else "black"
        axes.text(
            awaited,
            waiter,
            f"{value:,.0f}" if value >= 100 else f"{value:.3g}",
            ha="center",
            va="center",
            color=colour,
            fontsize="small",
        )
    axes.set(
        title="longest wait", xlabel="for rank", ylabel="of rank", xticks=range(num_ranks), yticks=range(num_ranks)
    )


def _draw_ranks(axes, timeline: Timeline) -> None:
    """A row per rank, time to the right: the share of the rank's warps in each kind of slice, stacked."""
    slices, durations = timeline.slices, timeline.durations()
    is_kernel, is_wait = timeline.kernels(), timeline.named(*WAITS)
    leaves = ~is_kernel & (slices["instant"] == 0)
    totals = np.bincount(slices["name"][leaves], durations[leaves], minlength=len(timeline.names))
    kinds = [i for i in np.argsort(-totals) if totals[i] > 0]
    edges = np.linspace(slices["begin_ns"].min(), slices["end_ns"].max() + 1, NUM_BINS + 1)
    middles = (edges[1:] + edges[:-1]) / 2e3
    colours = _colours(kinds, slices["name"][is_wait])
    for rank in range(timeline.num_ranks):
        own = slices["rank"] == rank
        num_warps = max(1, len(np.unique(timeline.warps()[own])))
        bottom = np.full(NUM_BINS, float(timeline.num_ranks - 1 - rank))
        for kind in kinds:
            pick = own & leaves & (slices["name"] == kind)
            _, begins, ends = merged(timeline.warps()[pick], slices["begin_ns"][pick], slices["end_ns"][pick])
            share = 0.9 * busy(begins, ends, edges) / num_warps
            label = timeline.names[kind] if rank == 0 else None
            axes.fill_between(
                middles, bottom, bottom + share, step="mid", color=colours[kind], label=label, linewidth=0
            )
            bottom += share
    axes.set(title="what the warps do (row: a rank; height: part of its warps)", xlabel="us")
    axes.set_yticks(np.arange(timeline.num_ranks) + 0.45, [f"rank {r}" for r in reversed(range(timeline.num_ranks))])
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))


def _colours(kinds: list[int], waits: np.ndarray) -> dict[int, str]:
    """Warm colours for waits, cold ones for work."""
    warm = iter(["tab:red", "tab:orange", "gold", "tab:pink", "tab:brown", "rosybrown"])
    cold = iter(["tab:blue", "tab:green", "tab:cyan", "tab:purple", "tab:olive", "tab:gray", "navy", "teal", "0.8"])
    return {kind: next(warm if kind in waits else cold, "0.5") for kind in kinds}
