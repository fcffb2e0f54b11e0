"""The critical path: from the last event back to its causes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_a2a.tracing.timeline import COLLECTIVES, DISPATCH_SENDERS, WAITS, Timeline

HOST = "(before the launch)"
INSIDE = "(inside a launch)"
FLIGHT = "flight"  # from the signal to the end of its wait


@dataclass
class PathStep:
    """A piece of the path: its rank, its launch, the kind of its slice (or one of the above), and its duration."""

    rank: int
    operation: str
    kind: str
    duration_ns: int
    token: int
    peer: int


def critical_path(timeline: Timeline, cause: np.ndarray) -> list[PathStep]:
    """Latest step first. At a wait whose signal is known, the path continues in the signalling warp at the time of the
    signal; otherwise in the same warp. At the start of a launch, it continues in the warp of that rank that ended last before
    it."""
    return _Walk(timeline, cause).steps()


class _Walk:
    def __init__(self, timeline: Timeline, cause: np.ndarray):
        self._timeline = timeline
        self._slices = timeline.slices
        self._cause = cause
        self._is_wait = timeline.named(*WAITS)
        self._kernel_of = timeline.enclosing_kernels()
        self._is_kernel = timeline.kernels()
        self._tells_at_its_begin = timeline.named(*DISPATCH_SENDERS, *COLLECTIVES)
        self._warps = timeline.warps()
        self._left: set[int] = set()  # waits that the path has already left for another rank
        # The walk makes no progress in a slice of no length (shorter than a step of the clock).
        lasts = timeline.durations() > 0
        leaves = np.flatnonzero(~self._is_kernel & lasts)
        self._leaves_of_warp = self._by_end(leaves, self._warps)
        self._waits_of_warp = self._by_end(leaves[self._is_wait[leaves]], self._warps)
        self._kernels_of_rank = self._by_end(np.flatnonzero(self._is_kernel & lasts), self._slices["rank"])

    def steps(self) -> list[PathStep]:
        ends = np.where(self._is_kernel, self._slices["end_ns"], -1)
        kernel = int(ends.argmax())
        if ends[kernel] < 0:
            return []
        steps: list[PathStep] = []
        time = int(ends[kernel])
        while kernel >= 0:
            kernel, time = self._through_launch(steps, kernel, time)
        return steps

    def _through_launch(self, steps: list[PathStep], kernel: int, time: int) -> tuple[int, int]:
        """Walks back from `time` within this launch of a warp. Returns the launch where the path continues (-1: none) and
        the time.

        Time never increases, and stays equal only at a wait that has not been left before: the walk ends."""
        warp = int(self._warps[kernel])
        # Clock error can put a signal before its own launch.
        begin = min(int(self._slices["begin_ns"][kernel]), time)
        while time > begin:
            leaf = self._last_ended(self._leaves_of_warp.get(warp), time)
            end = int(self._slices["end_ns"][leaf]) if leaf >= 0 else -1
            if end <= begin:
                break
            leaf, start = self._innermost(leaf)
            self._add(steps, kernel, INSIDE, time - end)
            source = int(self._cause[leaf])
            if self._is_wait[leaf] and leaf not in self._left and source >= 0 and self._kernel_of[source] >= 0:
                self._left.add(leaf)
                given = min(self._time_of_signal(source), end)
                self._add(steps, kernel, FLIGHT, end - given, leaf)
                return int(self._kernel_of[source]), given
            start = max(start, begin)
            self._add(steps, kernel, self._name(leaf), end - start, leaf)
            time = start
        self._add(steps, kernel, INSIDE, time - begin)
        before = self._last_ended(self._kernels_of_rank.get(int(self._slices["rank"][kernel])), begin)
        if before >= 0:
            end = int(self._slices["end_ns"][before])
            self._add(steps, kernel, HOST, begin - end)
            return before, end
        self._add(steps, kernel, HOST, begin - int(self._slices["begin_ns"].min()))
        return -1, begin

    def _innermost(self, leaf: int) -> tuple[int, int]:
        """The slice that the warp was in when this one ended, and its start: `lists` and `reduce` contain waits."""
        begins, ends = self._slices["begin_ns"], self._slices["end_ns"]
        if self._is_wait[leaf]:
            return leaf, int(begins[leaf])
        wait = self._last_ended(self._waits_of_warp.get(int(self._warps[leaf])), int(ends[leaf]))
        if wait < 0 or ends[wait] <= begins[leaf]:
            return leaf, int(begins[leaf])
        return (wait, int(begins[wait])) if ends[wait] == ends[leaf] else (leaf, int(ends[wait]))

    def _time_of_signal(self, source: int) -> int:
        """A signal is an instant. Other causes count from their end, which may be later than the wait's. Of a launch that
        sent the routing of a small batch, or announced a collective, only the start is known."""
        return int(self._slices["begin_ns" if self._tells_at_its_begin[source] else "end_ns"][source])

    def _by_end(self, which: np.ndarray, keys: np.ndarray) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Per key: the ends in ascending order, and their slices."""
        ends = self._slices["end_ns"]
        order = which[np.lexsort((ends[which], keys[which]))]
        starts = np.flatnonzero(np.diff(keys[order], prepend=-1))
        return {int(keys[part[0]]): (ends[part], part) for part in np.split(order, starts)[1:]}

    @staticmethod
    def _last_ended(lines: tuple[np.ndarray, np.ndarray] | None, time: int) -> int:
        if lines is None:
            return -1
        place = int(np.searchsorted(lines[0], time, side="right")) - 1
        return int(lines[1][place]) if place >= 0 else -1

    def _name(self, i: int) -> str:
        return self._timeline.names[self._slices["name"][i]]

    def _add(self, steps: list[PathStep], kernel: int, kind: str, duration_ns: int, leaf: int = -1) -> None:
        if duration_ns <= 0:
            return
        s = self._slices
        token, peer = (int(s["token"][leaf]), int(s["peer"][leaf])) if leaf >= 0 else (-1, -1)
        steps.append(PathStep(int(s["rank"][kernel]), self._name(kernel), kind, int(duration_ns), token, peer))
