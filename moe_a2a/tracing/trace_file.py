"""The contents of a trace file."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from moe_a2a.errors import TraceFileError
from moe_a2a.files.json_fields import FieldError, quoted

ABOUT = "about this trace"
PHASES = "phases"  # the track of a rank's phases
FLIGHT = "flight"  # the last part of a wait, from the signal on; its arrow ends there
# Arguments of a slice and their largest values (csrc/comm/trace_buffer.h has the bits of all but the bytes); -1: none.
ARGUMENTS = {
    "peer": 63,
    "token": (1 << 20) - 1,
    "polls": (1 << 16) - 1,
    "bytes": (1 << 40) - 1,
    "expert": (1 << 26) - 1,
    "rows": (1 << 16) - 1,
}
LATEST_NS = 1 << 48  # three days


@dataclass
class FileSlice:
    track: Any  # a key of TraceFile.tracks
    name: str
    begin_ns: int
    end_ns: int
    arguments: dict[str, int]  # of ARGUMENTS


@dataclass
class TraceFile:
    """The contents that both formats share.

    processes: name of each. tracks: process and name of each. slices: in the order of the file.
    sources, sinks: per flow, the (slice index, time in ns) of each event that names it as such.
    counters: per (process, name), its times and values. about: the metadata, unchecked. problems: events that are valid but
        out of place.
    """

    path: str
    processes: dict[Any, str] = field(default_factory=dict)
    tracks: dict[Any, tuple[Any, str]] = field(default_factory=dict)
    slices: list[FileSlice] = field(default_factory=list)
    sources: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    sinks: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    counters: dict[tuple[Any, str], tuple[list[int], list[int]]] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def rank_of(self, track: Any) -> int:
        """The rank of a track, from the name of its process; -1 if that is not a rank's."""
        process, _ = self.tracks.get(track, (None, ""))
        named = re.fullmatch(r"rank ([0-9]{1,6})", self.processes.get(process, ""))
        return int(named[1]) if named else -1

    def phase_tracks(self) -> set[Any]:
        """Tracks of ranks' phases: drawn from the launches of their warps, so they add no information."""
        return {track for track, (_, name) in self.tracks.items() if re.fullmatch(rf"{PHASES}( \([0-9]+\))?", name)}

    def warp_of(self, track: Any) -> tuple[int, int]:
        """Block and warp, from the name of the track; -1, -1 if that is not a warp's."""
        named = re.match(r"block ([0-9]{1,6}) warp ([0-9]{1,4})(?![0-9])", self.tracks[track][1])
        return (int(named[1]), int(named[2])) if named else (-1, -1)

    def error(self, reason: str) -> TraceFileError:
        return TraceFileError(self.path, reason)


def checked_arguments(arguments: dict[str, Any]) -> dict[str, int]:
    """The arguments of a slice that are known here."""
    known = {name: arguments[name] for name in ARGUMENTS if name in arguments}
    for name, value in known.items():
        if type(value) is not int or not -1 <= value <= ARGUMENTS[name]:
            raise FieldError(f"{name} is {quoted(value)}, not an integer from -1 to {ARGUMENTS[name]}")
    return known
