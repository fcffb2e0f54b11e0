"""Result files, and their figures as the text of a table."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def results(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "bench/results" / f"{name}.json").read_text())


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(header), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def us(time: float) -> str:
    return f"{time:.1f}" if time < 100 else f"{time:.0f}"
