"""The critical path ends on every timeline, even if launches take no time or signals go back in time."""

import numpy as np
import pytest
from limits import limits

from moe_a2a.tracing.critical_path import critical_path
from moe_a2a.tracing.timeline import ARROW, SLICE, Timeline

pytestmark = pytest.mark.cpu

NAMES = ["dispatch_recv", "row_wait", "signal", "lists"]


def timeline(*slices, num_ranks=2):
    """slices: (name, rank, begin, end), one warp per rank."""
    table = np.full(len(slices), -1, SLICE)
    for i, (name, rank, begin, end) in enumerate(slices):
        table[i]["name"], table[i]["rank"] = NAMES.index(name), rank
        table[i]["begin_ns"], table[i]["end_ns"] = begin, end
    table["block"] = table["warp"] = 0
    about = {"operations": ["dispatch_recv"], "configuration": {"num_ranks": num_ranks}}
    return Timeline(table, np.empty(0, ARROW), NAMES, about)


def walked(timeline, cause):
    with limits():
        return critical_path(timeline, np.array(cause, np.int64))


def test_a_launch_of_no_length_is_not_its_own_predecessor():
    steps = walked(timeline(("dispatch_recv", 0, 10, 10), ("lists", 0, 2, 5)), [-1, -1])
    assert sum(step.duration_ns for step in steps) == 8


def test_two_launches_of_no_length_do_not_follow_each_other():
    assert walked(timeline(("dispatch_recv", 0, 10, 10), ("dispatch_recv", 0, 10, 10)), [-1, -1]) == []


def test_two_waits_that_end_each_other_are_left_behind():
    """Clocks have errors: each of the two signals is at the end of the other rank's wait."""
    slices = [("dispatch_recv", r, 0, 100) for r in (0, 1)] + [("row_wait", r, 50, 100) for r in (0, 1)]
    steps = walked(timeline(*slices), [-1, -1, 3, 2])
    assert sum(step.duration_ns for step in steps) == 100


def test_a_signal_before_its_own_launch_leads_back_in_time():
    """A signal of a launch that began after the wait's end: the path must not jump forward to it and come back."""
    slices = [
        ("dispatch_recv", 0, 0, 100), ("row_wait", 0, 50, 100),
        ("dispatch_recv", 1, 150, 300), ("signal", 1, 160, 160), ("row_wait", 1, 120, 140), ("dispatch_recv", 1, 20, 149),
    ]  # fmt: skip
    steps = walked(timeline(*slices), [-1, 3, -1, -1, 1, -1])
    assert all(step.duration_ns > 0 for step in steps)
    assert sum(step.duration_ns for step in steps) <= 300
