"""Writes a timeline to a file."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from moe_a2a import _core, arguments
from moe_a2a.files.replaced_files import replaced
from moe_a2a.tracing.counters import counters
from moe_a2a.tracing.overview import phases
from moe_a2a.tracing.timeline import Timeline

JSON_ENDINGS = (".json", ".json.gz")
PROTOBUF_ENDINGS = (".pftrace", ".perfetto-trace")
ENDINGS = JSON_ENDINGS + PROTOBUF_ENDINGS
GZIP_LEVEL = 3  # level 9 takes five times as long and saves a tenth


def save(timeline: Timeline, path: str | Path) -> Path:
    """The suffix selects the format: .json and .json.gz are Chrome's, .pftrace and .perfetto-trace Perfetto's."""
    path = Path(path)
    write = _writer_for(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as raw, _opened(raw, path) as file:
        samples, counter_names = counters(timeline)
        slices = np.concatenate([timeline.slices, phases(timeline)])  # last: arrows index the others
        about = json.dumps(timeline.about)
        write(file.write, slices, timeline.arrows, samples, timeline.names, counter_names, about)
    return path


def _opened(raw: BinaryIO, path: Path) -> contextlib.AbstractContextManager[Any]:
    if path.name.endswith(".gz"):
        return gzip.GzipFile(path.name, "wb", GZIP_LEVEL, raw)
    return contextlib.nullcontext(raw)


def check_path(path: str | Path) -> None:
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path={arguments.shown(path)} is a {type(path).__name__}; pass the path of a file")
    _writer_for(Path(path))


def path_of_rank(path: str | Path, rank: int) -> Path:
    """The file of one rank: .rank<r> before the ending."""
    path = Path(path)
    ending = next(ending for ending in ENDINGS if path.name.endswith(ending))
    return path.with_name(f"{path.name.removesuffix(ending)}.rank{rank}{ending}")


def _writer_for(path: Path):
    if path.name.endswith(JSON_ENDINGS):
        return _core.write_chrome_json
    if path.name.endswith(PROTOBUF_ENDINGS):
        if not hasattr(_core, "write_perfetto"):
            raise ValueError(
                f"{path}: this build of moe_a2a writes Chrome JSON only, because protozero's headers were not there when "
                "it was built; save as .json.gz, which Perfetto opens too, or install libprotozero-dev and build again"
            )
        return _core.write_perfetto
    raise ValueError(f"{path}: pass a path that ends in one of {', '.join(ENDINGS)}")
