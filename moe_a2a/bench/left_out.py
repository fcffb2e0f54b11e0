"""Contenders without a figure, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

Line = dict[str, str]  # "what", "case" ("": all of them), "why"


def leave_out(left_out: list[Line], what: str, case: str, why: str) -> None:
    """Adds a line, unless it is there already."""
    line = {"what": what, "case": case, "why": why}
    if line not in left_out:
        left_out.append(line)


def left_out_lines(left_out: Iterable[Line]) -> Iterator[str]:
    """As text, one line per case and reason."""
    for (case, why), lines in groupby(left_out, lambda line: (line["case"], line["why"])):
        where = f" ({case})" if case else ""
        yield f"no figure: {', '.join(line['what'] for line in lines)}{where}: {why}"
