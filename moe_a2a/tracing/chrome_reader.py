"""Chrome's trace event format."""

from __future__ import annotations

from typing import Any

from moe_a2a.files.json_fields import FieldError, loads, quoted
from moe_a2a.tracing.trace_file import ABOUT, LATEST_NS, FileSlice, TraceFile, checked_arguments

LATEST_US = LATEST_NS / 1000


def parse(data: bytes, file: TraceFile) -> None:
    content = loads(data)
    events = content if isinstance(content.value, list) else content["traceEvents"]
    reader = _Reader(file)
    for number, event in enumerate(events.items()):
        try:
            reader.add(event.value)
        except FieldError as error:
            raise FieldError(f"event {number}: {error}") from None


class _Reader:
    def __init__(self, file: TraceFile):
        self._file = file
        self._last_slice: dict[Any, int] = {}  # of each track

    def add(self, event: Any) -> None:
        if not isinstance(event, dict):
            raise FieldError(f"it is {quoted(event)}, not an object")
        phase = event.get("ph")
        if phase == "X":
            self._slice(event)
        elif phase in ("s", "f"):
            self._flow_end(event)
        elif phase == "C":
            self._counter(event)
        elif phase == "M":
            self._name(event)
        elif phase == "i" and event.get("name") == ABOUT:
            self._file.about = _object(event, "args")
        else:
            self._file.problems.append(f"an event has the phase {quoted(phase)}, which Trace.save() never writes")

    def _slice(self, event: dict) -> None:
        track, slices = _track(event), self._file.slices
        self._last_slice[track] = len(slices)
        begin = _ns(event, "ts")
        arguments = checked_arguments(_object(event, "args")) if "args" in event else {}
        slices.append(FileSlice(track, _text(event, "name"), begin, begin + _ns(event, "dur"), arguments))
        self._file.tracks.setdefault(track, (track[0], ""))

    def _flow_end(self, event: dict) -> None:
        flow, last = _integer(event, "id"), self._last_slice.get(_track(event))
        if last is None:
            self._file.problems.append(f"flow {flow} is named on a track without a slice before it")
            return
        ends = self._file.sources if event["ph"] == "s" else self._file.sinks
        ends.setdefault(flow, []).append((last, _ns(event, "ts")))

    def _counter(self, event: dict) -> None:
        values = _object(event, "args")
        for key in values:
            where = (_integer(event, "pid"), f"{_text(event, 'name')} {key}")
            times, found = self._file.counters.setdefault(where, ([], []))
            times.append(_ns(event, "ts"))
            found.append(_integer(values, key))

    def _name(self, event: dict) -> None:
        if event.get("name") == "process_name":
            self._file.processes[_integer(event, "pid")] = _text(_object(event, "args"), "name")
        elif event.get("name") == "thread_name":
            track = _track(event)
            self._file.tracks[track] = (track[0], _text(_object(event, "args"), "name"))


def _track(event: dict) -> tuple[int, int]:
    return _integer(event, "pid"), _integer(event, "tid")


def _integer(event: dict, key: str) -> int:
    value = event.get(key)
    if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
        raise FieldError(f"{key} is {quoted(value)}, not an integer of 64 bits")
    return value


def _ns(event: dict, key: str) -> int:
    value: Any = event.get(key)
    if type(value) not in (int, float) or not -LATEST_US <= value <= LATEST_US:
        raise FieldError(f"{key} is {quoted(value)}, not a time in microseconds")
    return round(value * 1000)


def _text(event: dict, key: str) -> str:
    value = event.get(key)
    if not isinstance(value, str):
        raise FieldError(f"{key} is {quoted(value)}, not a string")
    return value


def _object(event: dict, key: str) -> dict:
    value = event.get(key)
    if not isinstance(value, dict):
        raise FieldError(f"{key} is {quoted(value)}, not an object")
    return value
