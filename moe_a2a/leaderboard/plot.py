"""The plot of a ranking: time per shape, a line per entry, the null submission and the link's floor below."""

from __future__ import annotations

import io
from typing import Any

from moe_a2a.leaderboard.record import Board

NULL_STYLE: dict[str, Any] = {"color": "0.35", "linestyle": (0, (4, 2)), "linewidth": 1.2}
FLOOR_STYLE: dict[str, Any] = {"color": "0.35", "linestyle": (0, (1, 2)), "linewidth": 1.2}


def as_svg(board: Board) -> str:
    """An <svg> element; "" without matplotlib, or if there are no times."""
    try:
        import matplotlib
    except ImportError:
        return ""
    timed = [entry for entry in board.ranked() if entry.timings]
    if not timed:
        return ""
    matplotlib.use("Agg")  # there may be no display
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), layout="constrained")
    panel = figure.subplots()
    for entry in timed:
        panel.errorbar(
            [timing.label for timing in entry.timings],
            [timing.mean_us for timing in entry.timings],
            [timing.err_us for timing in entry.timings],
            marker="o",
            markersize=4,
            capsize=3,
            label=_label(entry.name),
        )
    panel.plot([one.label for one in board.null], [one.mean_us for one in board.null], label="null", **NULL_STYLE)
    if board.floor_us:
        panel.plot([one.label for one in board.null], board.floor_us, label="floor", **FLOOR_STYLE)
    else:
        panel.plot([], [], label=f"floor: n/a, {board.no_floor}", **FLOOR_STYLE)
    panel.set(yscale="log", ylabel="time of a call, us (mean, standard error)")
    panel.grid(color="0.9")
    panel.tick_params(axis="x", labelrotation=20)
    panel.legend(frameon=False)
    text = io.StringIO()
    # Equal numbers make equal files.
    with matplotlib.rc_context({"svg.hashsalt": board.problem}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def _label(name: str) -> str:
    """The name as matplotlib prints it: half a surrogate pair is an error, "$" begins a formula, and a leading "_" hides the line
    from the legend."""
    text = name.encode(errors="backslashreplace").decode().replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text
