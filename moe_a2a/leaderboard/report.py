"""Renders a ranking as Markdown, and all problems of a folder as one HTML page."""

from __future__ import annotations

import html
import textwrap
from pathlib import Path

from moe_a2a.files import replaced_files
from moe_a2a.leaderboard import plot
from moe_a2a.leaderboard.cases import problem_names
from moe_a2a.leaderboard.record import Board, Entry
from moe_a2a.leaderboard.statistics import geometric_mean
from moe_a2a.leaderboard.verdicts import MEANINGS, PASS

PAGE = "leaderboard.html"
MOST_CHARACTERS = 2000  # longer messages are cut
HOW = (
    "A time is rank 0's, from after a barrier to after the next: the mean over calls, each on new data from a secret seed, "
    "each output checked. A score is the geometric mean over shapes. The null submission does nothing: its time is the "
    "harness's own, and part of every time. The floor is what the busiest rank must send or receive, divided by the rate of the "
    "link that a bare kernel reached in the same run: no launch, no wait, no computation. Entries are not compared across machines."
)
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto }
td, th { padding: .25rem .7rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap }
td:first-child, th:first-child { text-align: left }
pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; font-size: 13px; line-height: 1.35 }
svg { max-width: 100%; height: auto }
.failed { color: #a00 } .quiet { color: #666 }
"""


def boards_in(folder: Path) -> dict[Path, Board]:
    """Raises UsageError if a file with the name of a problem is no ranking."""
    paths = [folder / f"{name}.json" for name in problem_names()]
    return {path: Board.read(path) for path in paths if path.exists()}


def write_all(folder: Path) -> list[Path]:
    """Writes Markdown beside each <problem>.json, and the page. Other files are left alone."""
    boards = boards_in(folder)
    written = []
    for path, board in boards.items():
        svg = plot.as_svg(board)
        if svg:
            _write(path.with_suffix(".svg"), svg)
        _write(path.with_suffix(".md"), as_markdown(board, path.with_suffix(".svg").name if svg else ""))
        written.append(path.with_suffix(".md"))
    page = folder / PAGE
    _write(page, as_html(list(boards.values())))
    return [*written, page]


def _write(path: Path, text: str) -> None:
    replaced_files.write_text(path, text, errors="backslashreplace")


# ---- content shared by both formats


def about(board: Board) -> str:
    text = (
        f"{board.ranks} ranks on {board.device} ({board.machine}), {board.date}, moe_a2a {board.versions['moe_a2a']}, "
        f"commit {board.versions.get('commit')}, "
        f"PyTorch {board.versions['torch']}, seed {board.secret}."
    )
    if board.link_gbps:
        text += f" Link: {board.link_gbps:.3g} GB/s sent by each rank while all send."
    if board.no_floor:
        text += f" No floor: {board.no_floor}."
    if board.shortened is not None:
        text += f" Shortened: {board.shortened:g} s of calls per shape, not the contract's 30."
    if board.shrunk is not None:
        text += f" Shrunk: sizes divided by {board.shrunk}, not the published shapes."
    return text


def table(board: Board) -> list[list[str]]:
    """Rows of cells, header first: entries in rank order, then the null submission, the floor and the published bound."""
    head = ["entry", "score, us", *(timing.label for timing in board.null)]
    rows = [head]
    for entry in board.ranked():
        times = [f"{timing.mean_us:.1f} ± {timing.err_us:.1f}" for timing in entry.timings] or ["" for _ in board.null]
        rows.append([entry.name, f"{entry.score_us:.1f}" if entry.verdict == PASS else entry.verdict, *times])
    rows.append(_bound("null", [timing.mean_us for timing in board.null]))
    rows.append(_bound("floor", board.floor_us) if board.floor_us else ["floor", *("n/a" for _ in head[1:])])
    if board.speed_of_light_us:
        rows.append(["bound published for 8 MI300X", "", *(f"{bound:g}" for bound in board.speed_of_light_us)])
    return rows


def _bound(name: str, times_us: list[float]) -> list[str]:
    digits = 1 if min(times_us) >= 1 else 2
    return [name, *(f"{time:.{digits}f}" for time in (geometric_mean(times_us), *times_us))]


def verdict_line(entry: Entry) -> str:
    """One line, whatever the submission says: its own would look like sections of the report."""
    if entry.verdict == PASS:
        return f"passed every mode; {traffic_line(entry)}"
    where = f"{entry.failed_mode}, shape {entry.failed_case}"
    message = textwrap.shorten(entry.message, MOST_CHARACTERS, placeholder=" ...")
    return f"{entry.verdict} ({MEANINGS[entry.verdict]}): {where}: {message}"


def traffic_line(entry: Entry) -> str:
    """The traffic of the last test, which is the largest."""
    if not entry.traffic:
        return "traffic not counted"
    last = entry.traffic[-1]
    shared = (
        f"{last.shared_bytes} bytes of shared pages touched" if last.shared_bytes >= 0 else "shared pages not counted"
    )
    return f"all ranks, test {last.label}: {last.collective_bytes} bytes sent by torch.distributed, {shared}"


# ---- Markdown


def as_markdown(board: Board, picture: str) -> str:
    head, *rows = table(board)
    lines = [f"# {board.problem}", "", board.summary, "", about(board), "", HOW, ""]
    lines += [_markdown_row(head), _markdown_row(["---", *("---:" for _ in head[1:])]), *map(_markdown_row, rows), ""]
    if picture:
        lines += [f"![Time per shape]({picture})", ""]
    for entry in board.ranked():
        lines += [f"## {entry.name}", "", verdict_line(entry), ""]
        if entry.summary:
            lines += [
                f"Trace of shape {entry.profiled_case}: `{entry.trace_file}`",
                "",
                "```",
                entry.summary.rstrip(),
                "```",
                "",
            ]
    return "\n".join(lines)


def _markdown_row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


# ---- HTML


def as_html(boards: list[Board]) -> str:
    sections = "\n".join(_section(board) for board in boards)
    links = " · ".join(f'<a href="#{html.escape(board.problem)}">{html.escape(board.problem)}</a>' for board in boards)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>moe_a2a leaderboard</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>Leaderboard</h1>\n<p>{links}</p>\n<p>{html.escape(HOW)}</p>\n"
        f"{sections}\n</body>\n</html>\n"
    )


def _section(board: Board) -> str:
    head, *rows = table(board)
    cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    return (
        f'<h2 id="{html.escape(board.problem)}">{html.escape(board.problem)}</h2>\n<p>{html.escape(board.summary)}</p>\n'
        f'<p class="quiet">{html.escape(about(board))}</p>\n<table>\n<tr>{cells}</tr>\n{body}</table>\n{plot.as_svg(board)}\n'
        + "".join(_explained(entry) for entry in board.ranked())
    )


def _explained(entry: Entry) -> str:
    kind = "" if entry.verdict == PASS else ' class="failed"'
    text = f"<h3>{html.escape(entry.name)}</h3>\n<p{kind}>{html.escape(verdict_line(entry))}</p>\n"
    if entry.summary:
        title = f"Trace of shape {entry.profiled_case}: {entry.trace_file}"
        text += f"<details><summary>{html.escape(title)}</summary><pre>{html.escape(entry.summary)}</pre></details>\n"
    return text
