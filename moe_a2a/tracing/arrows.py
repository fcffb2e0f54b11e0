"""Matches signals with the waits that they ended, on one clock."""

from __future__ import annotations

import numpy as np

from moe_a2a.tracing.timeline import (
    ARROW,
    CALL_WAIT,
    CHUNK_WAIT,
    COLLECTIVES,
    COMBINE_SENDERS,
    CREDIT_WAIT,
    DISPATCH_SENDERS,
    PARTIAL_WAIT,
    PUSH,
    REDUCE,
    ROUTE,
    ROW_WAIT,
    SIGNAL,
    TABLE_WAIT,
    Timeline,
    last_before,
)

TOKEN_BITS = 21


def match(timeline: Timeline, error_ns: np.ndarray, has_drops: np.ndarray) -> np.ndarray:
    """Arrows [m] of ARROW: from the signal of each row or sum to the wait that it ended.

    A dispatch's signal for (token, destination) matches the destination's row_wait for (source, token); a combine's signal
    matches a partial_wait in the same way. Keys repeat: there are many calls, a row may arrive in pieces with one signal
    each, and a wait that found its signal at once leaves no record. A wait therefore takes the last signal of its key before
    its end. If that signal belongs to an earlier call, clock error may have moved the right one just past the end, so the
    search is repeated with the error added.

    error_ns [R]: of each rank's clock. has_drops [R]: ranks whose buffer overflowed. Their right signal may be missing, so a
    signal from before the wait began is not matched."""
    slices = timeline.slices
    operation = timeline.enclosing_kernels()
    name_of_kernel = np.where(operation >= 0, slices["name"][operation], -1)
    found = []
    for wait_name, senders in ((ROW_WAIT, DISPATCH_SENDERS), (PARTIAL_WAIT, COMBINE_SENDERS)):
        sender_names = [i for i, name in enumerate(timeline.names) if name in senders]
        signals = np.flatnonzero(timeline.named(SIGNAL) & np.isin(name_of_kernel, sender_names))
        waits = np.flatnonzero(timeline.named(wait_name))
        s, w = slices[signals], slices[waits]
        tolerance = error_ns[w["rank"]] + error_ns[w["peer"]]
        last, late = (
            last_before(
                _key(s["rank"], s["peer"], s["token"]),
                s["begin_ns"],
                _key(w["peer"], w["rank"], w["token"]),
                w["end_ns"] + extra,
            )
            for extra in (0, np.ceil(tolerance).astype(np.int64))
        )
        launch = operation[waits]
        is_of_this_call = (last >= 0) & (launch >= 0)
        is_of_this_call[is_of_this_call] &= (
            s["begin_ns"][last[is_of_this_call]] >= slices["begin_ns"][launch[is_of_this_call]]
        )
        last = np.where(is_of_this_call, last, late)
        have = last >= 0
        signals, waits, tolerance = signals[last[have]], waits[have], tolerance[have]
        sure = ~has_drops[slices["rank"][signals]]
        sure |= slices["begin_ns"][signals] >= slices["begin_ns"][waits] - tolerance
        found.append(np.stack([signals[sure], waits[sure]], axis=1))
    return _one_sink_per_source(slices, np.concatenate(found))


def _one_sink_per_source(slices: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Each signal ends one wait: the first. A later wait that found the same signal has lost its own."""
    pairs = pairs[np.argsort(slices["end_ns"][pairs[:, 1]], kind="stable")]
    _, first = np.unique(pairs[:, 0], return_index=True)
    arrows = np.empty(len(first), ARROW)
    arrows["source"], arrows["sink"] = pairs[first].T
    return arrows


def causes(timeline: Timeline) -> np.ndarray:
    """int64 [n]: for each wait, the slice on the other rank that ended it; -1: unknown.

    An arrow gives the cause where there is one. The cause of a table_wait is the peer's routing of that chunk, or the peer's
    launch for a small batch, whose routing leaves no record. The cause of a credit_wait is the peer's launch that last read
    the buffer. Of collectives: the cause of a call_wait is the peer's launch, that of a chunk_wait the peer's push or
    reduction of that chunk, whichever came last.
    """
    cause = np.full(len(timeline.slices), -1, np.int64)
    waits = _waits_for_peers(timeline, TABLE_WAIT)
    cause[waits] = _routing_or_launch(timeline, waits)
    waits = _waits_for_peers(timeline, CREDIT_WAIT)
    cause[waits] = _last_of_peer(timeline, waits, (*COMBINE_SENDERS, "release"))
    waits = _waits_for_peers(timeline, CALL_WAIT)
    cause[waits] = _last_of_peer(timeline, waits, COLLECTIVES)
    waits = _waits_for_peers(timeline, CHUNK_WAIT)
    cause[waits] = _last_of_peer(timeline, waits, (PUSH, REDUCE), by_token=True)
    cause[timeline.arrows["sink"]] = timeline.arrows["source"]
    return cause


def _waits_for_peers(timeline: Timeline, name: str) -> np.ndarray:
    return np.flatnonzero(timeline.named(name) & (timeline.slices["peer"] >= 0))


def _routing_or_launch(timeline: Timeline, waits: np.ndarray) -> np.ndarray:
    slices = timeline.slices
    routing = _last_of_peer(timeline, waits, (ROUTE,), by_token=True)
    launch = _last_of_peer(timeline, waits, DISPATCH_SENDERS)
    # A rank's launches do not overlap: if the routing's launch ended before the next one began, it is an earlier call's.
    launch_of_routing = timeline.enclosing_kernels()[routing]
    is_of_this_call = (routing >= 0) & (launch_of_routing >= 0)
    is_of_this_call &= (launch < 0) | (slices["end_ns"][launch_of_routing] >= slices["begin_ns"][launch])
    return np.where(is_of_this_call, routing, launch)


def _last_of_peer(timeline: Timeline, waits: np.ndarray, names: tuple[str, ...], by_token: bool = False) -> np.ndarray:
    """For each wait, the last slice with one of these names that began on its peer before the wait ended; -1: none."""
    givers = np.flatnonzero(timeline.named(*names))
    w, g = timeline.slices[waits], timeline.slices[givers]
    last = last_before(
        _key(g["rank"], 0, np.maximum(g["token"], 0) if by_token else 0),
        g["begin_ns"],
        _key(w["peer"], 0, np.maximum(w["token"], 0) if by_token else 0),
        w["end_ns"],
    )
    return np.append(givers, -1)[last]  # index -1 picks the appended -1


def _key(source, destination, token) -> np.ndarray:
    return ((np.asarray(source, np.int64) << 8) + destination << TOKEN_BITS) + token
