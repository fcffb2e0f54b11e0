"""Rebuilds the timeline that was written to a file, for a summary or a plot."""

from __future__ import annotations

from collections import Counter
from itertools import compress
from typing import Any

import numpy as np

from moe_a2a.files.json_fields import Field, FieldError, quoted
from moe_a2a.tracing.timeline import ARROW, MOMENTS, SLICE, Timeline
from moe_a2a.tracing.trace_file import ABOUT, ARGUMENTS, FLIGHT, TraceFile

MAX_RANKS = 64  # that the peer of a record can name
# merged() lays all warps end to end on one int64 line.
LONGEST_LINE_NS = 1 << 62


def to_timeline(file: TraceFile) -> Timeline:
    """Raises TraceFileError unless the file is complete: a summary of a part would be silently wrong."""
    try:
        return _Builder(file).timeline()
    except FieldError as error:
        raise file.error(str(error)) from None


def check_about(about: dict[str, Any]) -> None:
    """Raises FieldError unless the metadata has the form that merge.py writes."""
    top = Field(about, "")
    num_ranks = top["configuration"]["num_ranks"].integer(1, MAX_RANKS)
    top["format"].text()
    for operation in top["operations"].items():
        operation.text()
    for name in ("arrows", "arrows_backwards_beyond_clock_error"):
        top[name].integer()
    for rank in top["ranks"].items():
        rank["rank"].integer(0, num_ranks - 1)
        rank["clock_error_ns"].number()
        for name in ("records_attempted", "records_written", "records_dropped", "signals_without_record"):
            rank[name].integer()
    if not 1 <= len({rank["rank"] for rank in about["ranks"]}) == len(about["ranks"]):
        raise FieldError(f"ranks names {len(about['ranks'])} ranks, not each of them once")
    counts = Field(about.get("tokens_per_expert", []), "tokens_per_expert").items()
    for count in counts:
        count.integer(0, 1 << 40)
    if len(counts) % num_ranks:
        raise FieldError(f"tokens_per_expert has {len(counts)} experts for {num_ranks} ranks")


def slices_of_ranks(file: TraceFile) -> dict[int, tuple[int, int]]:
    """For each rank named in `about`: the number of its slices in the file, and the number it should have."""
    rank_of_track = {track: file.rank_of(track) for track in file.tracks}
    found = Counter(rank_of_track[s.track] for s, is_own in zip(file.slices, own_slices(file), strict=True) if is_own)
    return {
        rank["rank"]: (found[rank["rank"]], rank["records_written"] + rank["signals_without_record"])
        for rank in file.about["ranks"]
    }


def own_slices(file: TraceFile) -> list[bool]:
    """For each slice, whether it comes from a record: flights and phases are derived from others."""
    phases = file.phase_tracks()
    return [s.name != FLIGHT and s.track not in phases for s in file.slices]


class _Builder:
    def __init__(self, file: TraceFile):
        self._file = file
        self._is_own = own_slices(file)

    def timeline(self) -> Timeline:
        """Without flights and phases: an arrow ends in its wait again, the slice before its flight."""
        file = self._file
        if not file.about:
            raise FieldError(f'it has no event "{ABOUT}"')
        check_about(file.about)
        if file.problems:
            raise FieldError(file.problems[0])
        for rank, (found, expected) in slices_of_ranks(file).items():
            if found != expected:
                raise FieldError(f"it is cut or damaged: it has {found} of the {expected} slices of rank {rank}")
        kept = list(compress(file.slices, self._is_own))
        if not kept:
            raise FieldError("the trace is empty: no kernel ran inside its block")
        names = list(dict.fromkeys([*file.about["operations"], *(s.name for s in kept)]))
        timeline = Timeline(self._slices(kept, names), np.empty(0, ARROW), names, file.about)
        timeline.slices["instant"] = timeline.named(*MOMENTS)
        timeline.arrows = self._arrows()
        return timeline

    def _slices(self, kept: list, names: list[str]) -> np.ndarray:
        numbers = {name: number for number, name in enumerate(names)}
        slices = np.full(len(kept), -1, SLICE)
        slices["begin_ns"] = [s.begin_ns for s in kept]
        slices["end_ns"] = [s.end_ns for s in kept]
        slices["name"] = [numbers[s.name] for s in kept]
        warps = {s.track: self._place_of(s.track) for s in kept}
        for at, column in enumerate(("rank", "block", "warp")):
            slices[column] = [warps[s.track][at] for s in kept]
        for name in ARGUMENTS:
            slices[name] = [s.arguments.get(name, -1) for s in kept]
        wrong = np.flatnonzero((slices["begin_ns"] < 0) | (slices["end_ns"] < slices["begin_ns"]))
        if len(wrong):
            s = kept[wrong[0]]
            raise FieldError(f"{quoted(s.name)} lasts from {s.begin_ns} to {s.end_ns} ns")
        if slices["peer"].max() >= self._num_ranks:
            raise FieldError(f"a slice has the peer {slices['peer'].max()}, with {self._num_ranks} ranks")
        span = int(slices["end_ns"].max() - slices["begin_ns"].min())
        if (span + 2) * len(warps) > LONGEST_LINE_NS:
            raise FieldError(f"{len(warps)} tracks of {span} ns are too long to be added up")
        return slices

    def _place_of(self, track: Any) -> tuple[int, int, int]:
        """Rank, block and warp."""
        place = (self._file.rank_of(track), *self._file.warp_of(track))
        if min(place) < 0 or place[0] >= self._num_ranks:
            raise FieldError(f"the track {quoted(self._file.tracks[track][1])} is not that of a warp")
        return place

    def _arrows(self) -> np.ndarray:
        """Pairs of indices into the slices that come from records."""
        file = self._file
        place = np.cumsum(self._is_own) - 1  # a flight gets the place of its wait
        pairs = []
        for flow in file.sources.keys() | file.sinks.keys():
            sources, sinks = file.sources.get(flow, ()), file.sinks.get(flow, ())
            if len(sources) != 1 or len(sinks) != 1:
                raise FieldError(f"flow {flow} has {len(sources)} sources and {len(sinks)} sinks")
            pairs.append((place[sources[0][0]], place[sinks[0][0]]))
        if len(pairs) != file.about["arrows"]:
            raise FieldError(f"it is cut or damaged: it has {len(pairs)} of {file.about['arrows']} arrows")
        arrows = np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2)
        if arrows.size and arrows.min() < 0:
            raise FieldError("an arrow ends in a flight that belongs to no wait")
        return arrows.view(ARROW).reshape(-1)

    @property
    def _num_ranks(self) -> int:
        return self._file.about["configuration"]["num_ranks"]
