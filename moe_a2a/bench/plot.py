"""`python -m moe_a2a bench plot FILE...`: plots results.

time_against_tokens       of the first file: moe_a2a, the baselines and the floor, log-log
bandwidth_against_blocks  of the first file that has several numbers of blocks
scaling_over_ranks        of the first machine and shape with several numbers of ranks
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moe_a2a.bench.records import Record, Results
from moe_a2a.commands.command_line import UsageError, output_folder
from moe_a2a.files.json_fields import FieldError

STEPS = ("dispatch", "combine")
OURS = "moe_a2a"
FP8 = ", fp8"
FLOOR = {"color": "0.35", "linestyle": (0, (4, 2)), "linewidth": 1.2, "marker": ""}
FP8_FLOOR = FLOOR | {"color": "0.65"}
COLOURS = (
    "tab:blue",
    "tab:orange",
    "tab:green",
    "tab:red",
    "tab:purple",
    "tab:brown",
    "tab:pink",
    "tab:olive",
    "tab:cyan",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="results of bench dispatch_combine")
    parser.add_argument(
        "--out", type=output_folder, metavar="DIR", help="folder of the pictures (default: the first file's)"
    )


def run(options: argparse.Namespace) -> int:
    try:
        import matplotlib
    except ImportError:
        print("bench plot: matplotlib is not installed (pip install matplotlib)")
        return 1
    matplotlib.use("Agg")  # files only: there may be no display
    matplotlib.rcParams.update({"font.size": 10, "axes.grid": True, "grid.color": "0.9", "axes.axisbelow": True})
    all_results = [_read(path) for path in options.files]
    folder = options.out or options.files[0].parent
    pictures = {
        "time_against_tokens": _time_against_tokens(all_results[0]),
        "bandwidth_against_blocks": _bandwidth_against_blocks(all_results),
        "scaling_over_ranks": _scaling_over_ranks(all_results),
    }
    for name, figure in pictures.items():
        if figure is None:
            print(f"{name}: nothing to draw in these files")
            continue
        figure.savefig(folder / f"{name}.png", dpi=130)
        print(f"{name}: {folder / name}.png")
    return 0


def _read(path: Path) -> Results:
    try:
        return Results.read(path)
    except FieldError as error:
        raise UsageError(
            f"{path}: {error}; pass a file that `python -m moe_a2a bench dispatch_combine --json` wrote"
        ) from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


# ---- time against tokens


def _time_against_tokens(results: Results) -> Any:
    from matplotlib.ticker import LogLocator

    records = [r for r in results.records if r.part == "tokens" and r.routing == "uniform"]
    if not records:
        return None
    records = [r for r in records if r.dtype == records[0].dtype]
    figure, panels = _figure(results, records[0], columns=2)
    lines = _lines_of(records)
    styles = _styles_of(lines)
    for panel, step in zip(panels, STEPS, strict=True):
        for label, line in lines.items():
            _plot(panel, _points(line, step, "median_us"), label, **styles[label])
        for label, style in (("floor", FLOOR), ("floor" + FP8, FP8_FLOOR)):
            is_fp8 = label != "floor"
            if step == "dispatch" or not is_fp8:
                line = [r for r in records if is_fp8 == ("fp8" in r.mode and step == "dispatch")]
                _plot(panel, _points(line, step, "floor_us"), label, **style)
        panel.set(xscale="log", yscale="log", xlabel="tokens per rank", title=step)
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.set_xticks(sorted({r.tokens for r in records}))
        _plain_ticks(panel.xaxis, panel.yaxis)
        panel.tick_params(axis="x", labelrotation=45)  # powers of two are close together
    panels[0].set_ylabel("time, us (slowest rank's median)")
    _legend(figure, panels)
    return figure


def _lines_of(records: list[Record]) -> dict[str, list[Record]]:
    """The records of each line, by label. To limit the lines, modes other than "rows" show only their graph, if there is one."""
    has_graphs = any(r.launch == "graph" for r in records)
    lines: dict[str, list[Record]] = {}
    for r in records:
        if r.system != OURS:
            label = r.system + FP8 * ("fp8" in r.mode)
        elif r.mode == "rows":
            label = OURS + ", graph" * (r.launch == "graph")
        elif has_graphs and r.launch != "graph":
            continue
        else:
            label = f"{OURS}, {r.mode.replace('+', ' + ')}" + ", graph" * (r.launch == "graph")
        lines.setdefault(label, []).append(r)
    return lines


def _styles_of(labels: Iterable[str]) -> dict[str, dict[str, Any]]:
    """A colour for each; a baseline's float8 line is dotted, in the colour of its other line."""
    colours: dict[str, str] = {}
    styles = {}
    for label in labels:
        is_fp8 = label.endswith(FP8)
        name = label.removesuffix(FP8)
        colours.setdefault(name, COLOURS[len(colours) % len(COLOURS)])
        styles[label] = {"color": colours[name], "linestyle": ":" if is_fp8 else "-"}
    return styles


# ---- bandwidth against blocks

# The modes that differ in a step, and their lines.
MODES_OF_STEP = {
    "dispatch": {"rows": ("as they are", "-"), "fp8+presummed": ("quantised on the way", ":")},
    "combine": {"rows": ("summed in the kernel", "-"), "presummed": ("summed by the caller", "-.")},
}


def _bandwidth_against_blocks(all_results: list[Results]) -> Any:
    results = next((results for results in all_results if _of_blocks(results)), None)
    if results is None:
        return None
    records = _of_blocks(results)
    figure, panels = _figure(results, records[0], columns=2)
    for panel, step in zip(panels, STEPS, strict=True):
        for colour, tokens in zip(COLOURS, sorted({r.tokens for r in records}, reverse=True), strict=False):
            for mode, (what, style) in MODES_OF_STEP[step].items():
                line = [r for r in records if (r.tokens, r.mode, r.step) == (tokens, mode, step)]
                if line:
                    label = f"{step} of {tokens} tokens, {what}"
                    _plot(panel, _points(line, step, "gbps", against="blocks"), label, color=colour, linestyle=style)
            floor = next(r for r in records if (r.tokens, r.step) == (tokens, step))
            gbps = floor.remote_bytes / floor.floor_us / 1e3  # type: ignore[operator]
            panel.axhline(gbps, label=f"floor, {tokens}", **FLOOR | {"color": colour})
        panel.set(xlabel="blocks of the call", title=step)
        panel.set_xticks(sorted({r.blocks for r in records if r.step == step and r.blocks is not None}))
        panel.set_ylim(bottom=0)
    panels[0].set_ylabel("GB/s to other ranks, of the busiest rank")
    _legend(figure, panels)
    return figure


def _of_blocks(results: Results) -> list[Record]:
    return [
        r
        for r in results.records
        if (r.part, r.routing, r.system, r.launch) == ("blocks", "uniform", OURS, "eager")
        and r.mode in MODES_OF_STEP.get(r.step, {})
    ]


# ---- scaling over ranks


def _scaling_over_ranks(all_results: list[Results]) -> Any:
    """A plot of the first machine and shape that were measured with several numbers of ranks."""
    alike: dict[tuple[Any, ...], list[tuple[Results, Record]]] = {}
    for results in all_results:
        for r in results.records:
            if (r.part, r.routing, r.system, r.mode, r.launch) == ("tokens", "uniform", OURS, "rows", "eager"):
                kind = results.about.get("machine"), r.hidden, r.topk, r.experts, r.dtype
                alike.setdefault(kind, []).append((results, r))
    several = [group for group in alike.values() if len({r.ranks for _, r in group}) > 1]
    if not several:
        return None
    of_first, records = several[0][0][0], [r for _, r in several[0]]
    ranks = sorted({r.ranks for r in records})
    common = set.intersection(*({r.tokens for r in records if r.ranks == n} for n in ranks))
    shown = [tokens for tokens in (8, 128, 4096) if tokens in common] or sorted(common)[-3:]
    if not shown:
        return None
    figure, panels = _figure(of_first, records[0], columns=len(shown), with_ranks=False)
    for panel, tokens in zip(panels, shown, strict=True):
        line = [r for r in records if r.tokens == tokens]
        for colour, step in zip(COLOURS, STEPS, strict=False):
            _plot(panel, _points(line, step, "median_us", against="ranks"), step, color=colour)
            floor = FLOOR | {"color": colour}
            _plot(panel, _points(line, step, "floor_us", against="ranks"), f"{step}, floor", **floor)
        panel.set(xlabel="ranks", title=f"{tokens} tokens per rank", xticks=ranks)
        panel.set_ylim(bottom=0)
    panels[0].set_ylabel("time, us (slowest rank's median)")
    _legend(figure, panels)
    return figure


# ---- what all pictures share


def _figure(results: Results, record: Record, columns: int, with_ranks: bool = True) -> tuple[Any, list[Any]]:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, columns, figsize=(5.4 * columns, 5.4), layout="constrained", squeeze=False)
    ranks = f"{record.ranks} ranks on " if with_ranks else ""
    shape = f"hidden {record.hidden}, top-{record.topk} of {record.experts}, {record.dtype}, {record.cache} cache"
    figure.suptitle(f"{ranks}{results.about['machine']}: {shape}", fontsize="medium")
    for panel in axes[0]:
        panel.spines[["top", "right"]].set_visible(False)
    return figure, list(axes[0])


def _points(line: Iterable[Record], step: str, value: str, against: str = "tokens") -> list[tuple[Any, Any]]:
    """(x, y) of one step, sorted by x; of records with equal x the last one counts."""
    return sorted({getattr(r, against): getattr(r, value) for r in line if r.step == step}.items())


def _plot(panel: Any, points: list[tuple[Any, Any]], label: str, **style: Any) -> None:
    width = 2.2 if label.startswith(OURS) else 1.4
    x, y = zip(*points, strict=True) if points else ((), ())
    panel.plot(x, y, label=label, **{"marker": "o", "markersize": 3.5, "linewidth": width} | style)


def _legend(figure: Any, panels: list[Any]) -> None:
    """One legend for all panels, below them."""
    handles = {
        label: handle for panel in panels for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    columns = len(handles) if len(handles) <= 4 else min(4, -(-len(handles) // 2))
    place = {"loc": "outside lower center", "ncols": columns, "frameon": False, "fontsize": "small"}
    figure.legend(handles.values(), handles.keys(), **place)


def _plain_ticks(*axes: Any) -> None:
    """100, not 10^2; no ticks between."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    for axis in axes:
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())
        axis.set_tick_params(labelsize="small")
