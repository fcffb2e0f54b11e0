"""Checks that a trace file is consistent, from the file alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

from moe_a2a.files.json_fields import FieldError, quoted
from moe_a2a.tracing.file_timeline import check_about, slices_of_ranks
from moe_a2a.tracing.trace_file import FLIGHT, TraceFile

WAITS_WITH_ARROWS = {"row_wait", "partial_wait"}
MAX_SHOWN = 5  # problems per kind


def check_file(file: TraceFile) -> list[str]:
    """The problems of the file; empty if there are none."""
    problems = _shortened("reading", file.problems)
    metadata = _metadata(file)
    looks = [("names", _names), ("times", _times), ("nesting", _nesting), ("counters", _counters)]
    if not metadata:  # the rest is checked against it
        looks += [("flows", _flows), ("counts", _counts)]
    problems += _shortened("metadata", metadata)
    for what, look in looks:
        problems += _shortened(what, look(file))
    return problems


def _shortened(what: str, found: list[str]) -> list[str]:
    more = [f"{what}: and {len(found) - MAX_SHOWN} more"] if len(found) > MAX_SHOWN else []
    return [f"{what}: {problem}" for problem in found[:MAX_SHOWN]] + more


def _metadata(file: TraceFile) -> list[str]:
    try:
        check_about(file.about)
    except FieldError as error:
        return [str(error)]
    return []


def _names(file: TraceFile) -> list[str]:
    used = {s.track for s in file.slices}
    problems = [f"a process of track {file.tracks[t]} has no rank's name" for t in used if file.rank_of(t) < 0]
    problems += [f"track {t} has no name" for t in used if not file.tracks[t][1]]
    problems += [f"a slice at {s.begin_ns} ns has no name" for s in file.slices if not s.name]
    twice = [where for where, n in Counter(file.tracks[t] for t in used).items() if n > 1]
    return problems + [f"two tracks have the name {where}" for where in twice]


def _times(file: TraceFile) -> list[str]:
    problems: list[str] = []
    last: dict[Any, int] = {}  # begin, by track
    for s in file.slices:
        if s.begin_ns < 0 or s.end_ns < s.begin_ns:
            problems.append(f"{quoted(s.name)} from {s.begin_ns} to {s.end_ns} ns")
        if s.begin_ns < last.get(s.track, 0):
            problems.append(f"{quoted(s.name)} at {s.begin_ns} ns stands behind one of its track that begins later")
        last[s.track] = s.begin_ns
    return problems


def _nesting(file: TraceFile) -> list[str]:
    problems = []
    open_ends: dict = {}
    for s in sorted(file.slices, key=lambda s: (s.begin_ns, -s.end_ns)):
        ends = open_ends.setdefault(s.track, [])
        while ends and ends[-1] <= s.begin_ns:
            ends.pop()
        if ends and s.end_ns > ends[-1]:
            problems.append(
                f"{quoted(s.name)} from {s.begin_ns} to {s.end_ns} ns reaches across an end at {ends[-1]} ns"
            )
        ends.append(s.end_ns)
    return problems


def _flows(file: TraceFile) -> list[str]:
    problems = []
    error_ns = {r["rank"]: r["clock_error_ns"] for r in file.about["ranks"]}
    for flow in sorted(file.sources.keys() | file.sinks.keys()):
        sources, sinks = file.sources.get(flow, []), file.sinks.get(flow, [])
        if len(sources) != 1 or len(sinks) != 1:
            problems.append(f"flow {flow} has {len(sources)} sources and {len(sinks)} sinks")
            continue
        (source_at, source_ns), (flight_at, flight_ns) = sources[0], sinks[0]
        if flight_at == 0:
            problems.append(f"flow {flow} ends in the first slice, before which there is no wait")
            continue
        source, wait, flight = file.slices[source_at], file.slices[flight_at - 1], file.slices[flight_at]
        from_rank, to_rank = file.rank_of(source.track), file.rank_of(wait.track)
        if (source.name, flight.name) != ("signal", FLIGHT) or wait.name not in WAITS_WITH_ARROWS:
            problems.append(
                f"flow {flow} goes from {quoted(source.name)} to {quoted(flight.name)} of {quoted(wait.name)}"
            )
            continue
        if flight.track != wait.track or flight.begin_ns < wait.begin_ns or flight.end_ns != wait.end_ns:
            problems.append(f"flow {flow}: its flight is not the last part of its wait")
        sent, awaited = source.arguments, wait.arguments
        if (sent.get("peer"), from_rank) != (to_rank, awaited.get("peer")):
            problems.append(f"flow {flow}: rank {from_rank} signalled {sent}, rank {to_rank} waited for {awaited}")
        if sent.get("token") != awaited.get("token"):
            problems.append(f"flow {flow} is of token {sent.get('token')} and {awaited.get('token')}")
        if not source.begin_ns <= source_ns <= source.end_ns or flight_ns != flight.begin_ns:
            problems.append(f"flow {flow} leaves or arrives beside its slice")
        clocks_may_err = error_ns.get(from_rank, 0) + error_ns.get(to_rank, 0) + 2  # times are rounded down
        if wait.end_ns < source_ns - clocks_may_err:
            problems.append(f"flow {flow} goes back by {source_ns - wait.end_ns} ns, more than the clocks may err")
    flights = sum(s.name == FLIGHT for s in file.slices)
    if flights != len(file.sources):
        problems.append(f"{len(file.sources)} flows, {flights} flights")
    if len(file.sources) != file.about["arrows"]:
        problems.append(f"{len(file.sources)} flows, {file.about['arrows']} in the metadata")
    return problems


def _counts(file: TraceFile) -> list[str]:
    problems = []
    found = slices_of_ranks(file)
    for rank in file.about["ranks"]:
        number, written, dropped = rank["rank"], rank["records_written"], rank["records_dropped"]
        has, expected = found[number]
        if has != expected:
            problems.append(
                f"rank {number} has {has} slices, {written} were written and {expected - written} signals implied"
            )
        if rank["records_attempted"] != written + dropped:
            problems.append(
                f"rank {number}: {rank['records_attempted']} attempts, {written} written, {dropped} dropped"
            )
    return problems


def _counters(file: TraceFile) -> list[str]:
    problems = []
    for (process, name), (times, values) in file.counters.items():
        where = f"{quoted(name)} of {quoted(file.processes.get(process, process))}"
        if min(values) < 0:
            problems.append(f"{where} falls below zero")
        if times != sorted(times):
            problems.append(f"{where} goes back in time")
        if values[-1] != 0:
            problems.append(f"{where} ends at {values[-1]}")
    return problems
