"""The demo's plot: tokens per expert, and the time of a step."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moe_a2a.demo.report import ShapeResult
from moe_a2a.files.replaced_files import replaced

PHASES = ("dispatch", "experts", "combine")
COLOURS = ("tab:blue", "0.7", "tab:green")


def save(path: Path, tokens_per_expert: dict[str, np.ndarray], shapes: list[ShapeResult]) -> str | None:
    """Returns the reason if there is no plot, else None.

    tokens_per_expert: of each model, [num_ranks, num_experts], routes by the rank that sent them.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")  # files only: there may be no display
        from matplotlib import pyplot
    except ImportError:
        return "matplotlib is not installed (pip install matplotlib)"

    figure = pyplot.figure(figsize=(15, 8), layout="constrained")
    above, below = figure.subfigures(2, 1)  # type: ignore[misc]
    models = tokens_per_expert.items()
    for axes, (name, counts) in zip(_row_of_axes(above, len(models)), models, strict=True):
        _draw_experts(axes, name, counts)
    below.suptitle("time per step (experts / top-k / hidden / tokens at most)", fontsize="medium")
    for axes, shape in zip(_row_of_axes(below, len(shapes)), shapes, strict=True):
        _draw_step(axes, shape)
    below.axes[0].set_ylabel("milliseconds")
    below.axes[0].legend(fontsize="small")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as file:
            figure.savefig(file, format="png", dpi=110)
    except OSError as error:  # a full disk; the checks have their verdict all the same
        return f"{path} cannot be written: {error.strerror}"
    finally:
        pyplot.close(figure)
    return None


def _draw_experts(axes, name: str, counts: np.ndarray) -> None:
    """One bar per expert, stacked by sending rank; every second owner on a grey background."""
    num_ranks, num_experts = counts.shape
    per_rank = -(-num_experts // num_ranks)
    for owner in range(1, num_ranks, 2):
        axes.axvspan(owner * per_rank - 0.5, (owner + 1) * per_rank - 0.5, color="0.92", zorder=0)
    bottom = np.zeros(num_experts)
    for rank, routes in enumerate(counts):
        axes.bar(np.arange(num_experts), routes, bottom=bottom, width=0.8, label=f"rank {rank}")
        bottom += routes
    axes.set(title=name, xlabel="expert (shading: owning rank)", ylabel="tokens, by sending rank")
    axes.set_xlim(-0.5, num_experts - 0.5)
    axes.legend(fontsize="small")


def _draw_step(axes, shape: ShapeResult) -> None:
    """moe_a2a beside the baseline, each a stack of the three phases."""
    milliseconds = 1e3 * np.stack([shape.phases, shape.baseline_phases])
    bottom = np.zeros(2)
    for phase, colour, height in zip(PHASES, COLOURS, milliseconds.T, strict=True):
        axes.bar(("moe_a2a", "sort + gloo"), height, 0.7, bottom=bottom, color=colour, label=phase)
        bottom += height
    axes.set_title(shape.label, fontsize="medium")


def _row_of_axes(figure, num_columns: int):
    return figure.subplots(1, num_columns, squeeze=False)[0]
