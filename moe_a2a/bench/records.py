"""The results of a run: one record per (case, contender, step), and what all records share.

Times are microseconds, bytes are bytes, bandwidth is 1e9 bytes per second.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moe_a2a.files.json_fields import Field, loads

TYPES: dict[str, Any] = {"str": str, "int": int, "float": (int, float), "None": type(None)}


@dataclass
class Record:
    part: str  # of the suite: "tokens", "blocks", "routings", ...
    system: str
    mode: str
    launch: str  # "eager", "eager, halves", "graph", or "chain": ten pairs in one graph
    step: str  # "dispatch", "combine", "total", a half, or "pair": a dispatch and a combine of a chain
    tokens: int  # per rank
    hidden: int
    topk: int
    experts: int
    ranks: int
    dtype: str
    routing: str
    blocks: int | None  # None: not reported by the system, or the step has several launches
    median_us: float  # of the slowest rank
    p99_us: float  # over all ranks and iterations
    host_us: float | None  # until the call returns while the device is idle; None on the CPU
    remote_bytes: int | None  # rows that must cross a link, of the busiest rank; the same for every system
    gbps: float | None  # remote_bytes / median_us
    floor_us: float | None  # the same bytes, pushed by a bare kernel in the same run
    share_of_floor: float | None  # floor_us / median_us
    cache: str  # "warm" or "flushed"
    iterations: int


@dataclass
class Results:
    about: dict[str, Any]
    records: list[Record] = field(default_factory=list)
    floors: list[dict[str, Any]] = field(default_factory=list)  # every measured push
    overlaps: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[dict[str, str]] = field(default_factory=list)  # contenders without a figure, and why
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> str:
        """One record per line, so that two runs can be diffed."""
        content = asdict(self)
        lists = [key for key, value in content.items() if isinstance(value, list)]
        text = [f'"about": {json.dumps(content["about"], indent=1)}']
        for key in lists:
            rows = ",\n  ".join(json.dumps(_rounded(row)) for row in content[key])
            text.append(f'"{key}": [\n  {rows}\n ]' if rows else f'"{key}": []')
        return "{\n " + ",\n ".join(text) + "\n}\n"

    @staticmethod
    def read(path: Path) -> Results:
        """Raises FieldError if the file is of another kind."""
        top = loads(path.read_bytes())
        for name in ("machine", "name"):
            top["about"][name].text()
        records = [_record(row) for row in top["records"].items()]
        lists = ("floors", "overlaps", "left_out", "notes")
        return Results(top["about"].value, records, *([item.value for item in top[name].items()] for name in lists))


def _record(row: Field) -> Record:
    values = {name: row[name].value for name in Record.__dataclass_fields__}
    for name, type_name in Record.__annotations__.items():
        types = [TYPES[part] for part in type_name.split(" | ")]
        if not any(isinstance(values[name], kind) for kind in types) or isinstance(values[name], bool):
            raise row[name].error(type_name)
    return Record(**values)


def _rounded(row: Any) -> Any:
    if not isinstance(row, dict):
        return row
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}
