"""A trace file as it lies there, read by code that shares nothing with what wrote it."""

from __future__ import annotations

import gzip
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moe_a2a.tracing.timeline import ARROW, SLICE, Timeline

ABOUT = "about this trace"
FLIGHT = "flight"  # the last part of a wait, from the signal on: where its arrow ends
ARGUMENTS = ("peer", "token", "polls", "bytes")


@dataclass
class FileSlice:
    track: Any  # a key of TraceFile.tracks
    name: str
    begin_ns: int
    end_ns: int
    arguments: dict[str, int]


@dataclass
class TraceFile:
    """What either format says.

    processes: name of each. tracks: process and name of each. slices: in the order of the file.
    sources, sinks: of each flow, (slice index, time in ns) for each time that it is named as such.
    counters: per (process, name) its times and values. problems: what could not be understood.
    """

    processes: dict[Any, str] = field(default_factory=dict)
    tracks: dict[Any, tuple[Any, str]] = field(default_factory=dict)
    slices: list[FileSlice] = field(default_factory=list)
    sources: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    sinks: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    counters: dict[tuple[Any, str], tuple[list[int], list[int]]] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def rank_of(self, track: Any) -> int:
        """By the process's name; -1 when it has none."""
        process, _ = self.tracks.get(track, (None, ""))
        named = re.fullmatch(r"rank (\d+)", self.processes.get(process, ""))
        return int(named[1]) if named else -1


def read(path: str | Path) -> TraceFile:
    """Tells the formats apart by their first byte: a JSON object or an array, or a protobuf's first packet."""
    from moe_a2a.tracing import chrome_reader, perfetto_reader

    data = Path(path).read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    if data[:1] in (b"{", b"["):
        return chrome_reader.parse(data)
    if data[:1] == b"\x0a":
        return perfetto_reader.parse(data)
    raise ValueError(f"{path} is neither a JSON nor a Perfetto trace")


def to_timeline(file: TraceFile) -> Timeline:
    """For a summary or a picture of a file of ours. An arrow ends in its wait again, the slice before its flight."""
    if not file.about:
        raise ValueError(f'the file has no event "{ABOUT}": it is not one of ours')
    kept = [s for s in file.slices if s.name != FLIGHT]
    place = np.cumsum([s.name != FLIGHT for s in file.slices]) - 1  # of a flight: its wait's
    names = list(dict.fromkeys([*file.about["operations"], *(s.name for s in kept)]))
    numbers = {name: number for number, name in enumerate(names)}
    slices = np.full(len(kept), -1, SLICE)
    slices["begin_ns"] = [s.begin_ns for s in kept]
    slices["end_ns"] = [s.end_ns for s in kept]
    slices["name"] = [numbers[s.name] for s in kept]
    warps = {track: _warp_of(file, track) for track in file.tracks}
    for at, column in enumerate(("rank", "block", "warp")):
        slices[column] = [warps[s.track][at] for s in kept]
    for name in ARGUMENTS:
        slices[name] = [s.arguments.get(name, -1) for s in kept]
    timeline = Timeline(slices, np.empty(0, ARROW), names, file.about)
    slices["instant"] = timeline.named("signal", "gave_up")
    pairs = [(place[ends[0][0]], place[file.sinks[flow][0][0]]) for flow, ends in file.sources.items()]
    timeline.arrows = np.array(pairs, dtype=np.int64).reshape(-1, 2).view(ARROW).reshape(-1)
    return timeline


def _warp_of(file: TraceFile, track: Any) -> tuple[int, int, int]:
    named = re.match(r"block (\d+) warp (\d+)", file.tracks[track][1])
    block, warp = (int(named[1]), int(named[2])) if named else (-1, -1)
    return file.rank_of(track), block, warp
