"""Perfetto's protobuf format: those of its fields that matter here, straight from the bytes.

The encoding: protobuf.dev/programming-guides/encoding. A message is a sequence of (tag, value); tag = number << 3
| how the value is laid down: 0 a varint, 1 eight bytes, 2 a length and so many bytes, 5 four bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from moe_a2a.tracing.trace_file import ABOUT, FileSlice, TraceFile

BEGIN, END, INSTANT, COUNTER = 1, 2, 3, 4  # TrackEvent.type


def parse(data: bytes) -> TraceFile:
    parser = _Parser()
    for number, packet in _fields(data):
        if number == 1:
            parser.packet(packet)
    return parser.finished()


class _Parser:
    def __init__(self) -> None:
        self._file = TraceFile()
        self._names: dict[int, str] = {}
        self._argument_names: dict[int, str] = {}
        self._open: dict[int, list[int]] = {}  # slices of each track that have not ended
        self._process_of: dict[int, int] = {}  # by the uuid of its track
        self._counters: dict[int, tuple[int, str]] = {}

    def packet(self, packet: bytes) -> None:
        time, event = 0, None
        for number, value in _fields(packet):
            if number == 8:
                time = value
            elif number == 11:
                event = value
            elif number == 12:
                self._interned(value)
            elif number == 60:
                self._descriptor(value)
        if event is not None:
            self._event(time, event)

    def finished(self) -> TraceFile:
        for track, slices in self._open.items():
            for i in slices:
                self._file.problems.append(f"slice {self._file.slices[i].name} on track {track} never ends")
        return self._file

    def _interned(self, message: bytes) -> None:
        for number, entry in _fields(message):
            names = {2: self._names, 3: self._argument_names}.get(number)
            if names is not None:
                fields = dict(_fields(entry))
                names[fields[1]] = fields[2].decode()

    def _descriptor(self, message: bytes) -> None:
        fields = dict(_fields(message))
        uuid, name = fields[1], fields.get(2, b"").decode()
        if 3 in fields:
            process = dict(_fields(fields[3]))
            self._file.processes[process[1]] = process[6].decode()
            self._process_of[uuid] = process[1]
        elif 4 in fields:
            thread = dict(_fields(fields[4]))
            self._file.tracks[uuid] = (thread[1], thread[5].decode())
        elif 8 in fields:
            self._counters[uuid] = (self._process_of[fields[5]], name)

    def _event(self, time: int, message: bytes) -> None:
        kind = track = value = None
        name = ""
        arguments: dict[str, Any] = {}
        sources, sinks = [], []
        for number, field in _fields(message):
            if number == 9:
                kind = field
            elif number == 11:
                track = field
            elif number == 10:
                name = self._names.get(field, "")
            elif number == 23:
                name = field.decode()
            elif number == 4:
                self._annotation(field, arguments)
            elif number == 30:
                value = _signed(field)
            elif number == 47:
                sources.append(field)
            elif number == 48:
                sinks.append(field)
        if name == ABOUT:
            self._file.about = arguments
        elif kind == COUNTER:
            times, values = self._file.counters.setdefault(self._counters[track], ([], []))
            times.append(time)
            values.append(value)
        else:
            self._slice_event(kind, track, time, name, arguments, sources, sinks)

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

    def _annotation(self, message: bytes, into: dict[str, Any]) -> None:
        name, value = self._value(message)
        into[name] = value

    def _value(self, message: bytes) -> tuple[str, Any]:
        name, value = "", None
        for number, field in _fields(message):
            if number == 1:
                name = self._argument_names.get(field, "")
            elif number == 10:
                name = field.decode()
            elif number == 2:
                value = bool(field)
            elif number == 4:
                value = _signed(field)
            elif number == 5:
                value = struct.unpack("<d", struct.pack("<Q", field))[0]
            elif number == 6:
                value = field.decode()
            elif number == 11:
                key, part = self._value(field)
                value = {**(value or {}), key: part}
            elif number == 12:
                value = [*(value or []), self._value(field)[1]]
        return name, value


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and values: int, or bytes of what has a length."""
    at, end = 0, len(message)
    while at < end:
        tag, at = _varint(message, at)
        layout = tag & 7
        if layout == 0:
            value, at = _varint(message, at)
        elif layout == 2:
            length, at = _varint(message, at)
            if at + length > end:
                raise ValueError(f"a field of {length} bytes at {at} in a message of {end}: the file is cut")
            value = message[at : at + length]
            at += length
        elif layout in (1, 5):
            size = 8 if layout == 1 else 4
            value = int.from_bytes(message[at : at + size], "little")
            at += size
        else:
            raise ValueError(f"layout {layout} at byte {at} of a message: not a protobuf")
        yield tag >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    byte = data[at]
    at += 1
    if byte < 0x80:
        return byte, at
    value, shift = byte & 0x7F, 7
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
