"""Chrome's trace event format."""

from __future__ import annotations

import json
from typing import Any

from moe_a2a.tracing.trace_file import ABOUT, FileSlice, TraceFile


def parse(data: bytes) -> TraceFile:
    content = json.loads(data)
    events = content["traceEvents"] if isinstance(content, dict) else content
    file = TraceFile()
    last_slice: dict[Any, int] = {}  # of each track
    for event in events:
        phase, track = event.get("ph"), (event.get("pid"), event.get("tid"))
        if phase == "X":
            last_slice[track] = len(file.slices)
            begin = _ns(event["ts"])
            end = begin + _ns(event["dur"])
            file.slices.append(FileSlice(track, event["name"], begin, end, event.get("args", {})))
            file.tracks.setdefault(track, (event["pid"], ""))
        elif phase in ("s", "f"):
            _add_flow_end(file, event, last_slice.get(track))
        elif phase == "C":
            for key, value in event["args"].items():
                times, values = file.counters.setdefault((event["pid"], f"{event['name']} {key}"), ([], []))
                times.append(_ns(event["ts"]))
                values.append(value)
        elif phase == "M" and event["name"] == "process_name":
            file.processes[event["pid"]] = event["args"]["name"]
        elif phase == "M" and event["name"] == "thread_name":
            file.tracks[track] = (event["pid"], event["args"]["name"])
        elif phase == "i" and event["name"] == ABOUT:
            file.about = event["args"]
        elif phase != "M":
            file.problems.append(f'an event of phase "{phase}" that has no business here')
    return file


def _add_flow_end(file: TraceFile, event: dict, last: int | None) -> None:
    if last is None:
        file.problems.append(f"flow {event['id']} is named on a track without a slice before it")
        return
    ends = file.sources if event["ph"] == "s" else file.sinks
    ends.setdefault(event["id"], []).append((last, _ns(event["ts"])))


def _ns(microseconds: float) -> int:
    return round(microseconds * 1000)
