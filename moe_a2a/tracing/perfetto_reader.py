"""Perfetto's protobuf format: the fields that Trace.save() writes, decoded from the bytes."""

from __future__ import annotations

import re
import struct
from typing import Any

from moe_a2a.files.json_fields import FieldError, quoted
from moe_a2a.tracing.protobuf import fields, number, signed, text
from moe_a2a.tracing.trace_file import ABOUT, LATEST_NS, PHASES, FileSlice, TraceFile, checked_arguments

BEGIN, END, INSTANT, COUNTER = 1, 2, 3, 4  # TrackEvent.type
DEEPEST = 16  # nesting of annotations; Trace.save() writes four levels


def parse(data: bytes, file: TraceFile) -> None:
    parser = _Parser(file)
    for index, (field, packet) in enumerate(fields(data)):
        try:
            if field == 1:
                parser.packet(packet)
        except FieldError as error:
            raise FieldError(f"packet {index}: {error}") from None
    parser.finish()


class _Parser:
    def __init__(self, file: TraceFile) -> None:
        self._file = file
        self._names: dict[int, str] = {}
        self._argument_names: dict[int, str] = {}
        self._open: dict[int, list[int]] = {}  # slices of each track that have not ended
        self._rank_of: dict[int, str] = {}  # of each track, from the name of its top-level track
        self._counters: dict[int, tuple[str, str]] = {}

    def packet(self, packet: Any) -> None:
        time, event = 0, None
        for field, value in fields(packet):
            if field == 8:
                time = number(value)
            elif field == 11:
                event = value
            elif field == 12:
                self._interned(value)
            elif field == 60:
                self._descriptor(value)
        if event is not None:
            if time > LATEST_NS:
                raise FieldError(f"an event at {time} ns")
            self._event(time, event)

    def finish(self) -> None:
        for track, slices in self._open.items():
            for i in slices:
                self._file.problems.append(f"slice {quoted(self._file.slices[i].name)} on track {track} never ends")

    def _interned(self, message: Any) -> None:
        for field, entry in fields(message):
            names = {2: self._names, 3: self._argument_names}.get(field)
            if names is not None:
                entry = dict(fields(entry))
                names[number(entry.get(1))] = text(entry.get(2))

    def _descriptor(self, message: Any) -> None:
        """At the top, each rank has two tracks: "rank 3" for its phases, and "rank 3 ..." for a counter."""
        descriptor = dict(fields(message))
        uuid, name = number(descriptor.get(1)), text(descriptor.get(2, b""))
        parent = descriptor.get(5)
        if parent is None:
            top = re.fullmatch(r"(rank [0-9]{1,6})(?: (.*))?", name, re.DOTALL)
            rank, name = (top[1], top[2] or PHASES) if top else (name, "")
            self._file.processes[rank] = f"rank {int(rank[5:])}" if top else name
        elif parent in self._rank_of:
            rank = self._rank_of[parent]
        else:
            raise FieldError(f"track {quoted(name)} is part of track {quoted(parent)}, which has not been described")
        self._rank_of[uuid] = rank
        if 8 in descriptor:
            self._counters[uuid] = (rank, name)
        else:
            self._file.tracks[uuid] = (rank, name)

    def _event(self, time: int, message: Any) -> None:
        kind = track = value = None
        name = ""
        arguments: dict[str, Any] = {}
        sources, sinks = [], []
        for field, content in fields(message):
            if field == 9:
                kind = content
            elif field == 11:
                track = number(content)
            elif field == 10:
                name = self._names.get(number(content), "")
            elif field == 23:
                name = text(content)
            elif field == 4:
                key, argument = self._annotation(content)
                arguments[key] = argument
            elif field == 30:
                value = signed(content)
            elif field == 47:
                sources.append(number(content))
            elif field == 48:
                sinks.append(number(content))
        if name == ABOUT:
            self._file.about = arguments
        elif kind == COUNTER:
            if track not in self._counters or value is None:
                raise FieldError(f"a sample of {value} on track {track}, which is not a counter")
            times, values = self._file.counters.setdefault(self._counters[track], ([], []))
            times.append(time)
            values.append(value)
        elif kind in (BEGIN, END, INSTANT):
            self._slice_event(kind, track, time, name, checked_arguments(arguments), sources, sinks)
        else:
            self._file.problems.append(f"an event has the type {quoted(kind)}, which Trace.save() never writes")

    def _slice_event(self, kind, track, time, name, arguments, sources, sinks) -> None:
        slices, stack = self._file.slices, self._open.setdefault(track, [])
        self._file.tracks.setdefault(track, (None, ""))
        if kind == END:
            if not stack:
                self._file.problems.append(f"at {time} ns a slice ends on track {track} that never began")
                return
            at = stack.pop()
            slices[at].end_ns = time
        else:
            at = len(slices)
            slices.append(FileSlice(track, name, time, time, arguments))
            if kind == BEGIN:
                stack.append(at)
        for flow in sources:
            self._file.sources.setdefault(flow, []).append((at, time))
        for flow in sinks:
            self._file.sinks.setdefault(flow, []).append((at, time))

    def _annotation(self, message: Any, depth: int = 0) -> tuple[str, Any]:
        """Its name and value: a scalar, a dict or a list."""
        if depth > DEEPEST:
            raise FieldError(f"annotations are nested more than {DEEPEST} deep")
        name = ""
        value: Any = None
        for field, content in fields(message):
            if field == 1:
                name = self._argument_names.get(number(content), "")
            elif field == 10:
                name = text(content)
            elif field == 2:
                value = bool(content)
            elif field == 4:
                value = signed(content)
            elif field == 5:
                value = struct.unpack("<d", struct.pack("<Q", number(content)))[0]
            elif field == 6:
                value = text(content)
            elif field == 11:
                key, part = self._annotation(content, depth + 1)
                value = value if isinstance(value, dict) else {}
                value[key] = part
            elif field == 12:
                value = value if isinstance(value, list) else []
                value.append(self._annotation(content, depth + 1)[1])
        return name, value
