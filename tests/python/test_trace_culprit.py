"""Regression: 4 H200, 4096 tokens, one rank 2 ms late: "no single culprit". The time of every waiting thread was added up. One
thread per block waits for the late rank's table; thousands wait for the sums that follow, of all ranks alike, and for all of
them at the same time."""

import numpy as np
import pytest

from moe_a2a.tracing import arrows, blame
from moe_a2a.tracing.timeline import ARROW, SLICE, Timeline

NAMES = ["dispatch", "combine", "route", "table_wait", "signal", "partial_wait"]
NUM_RANKS, NUM_BLOCKS, NUM_WARPS, NUM_SUMS = 4, 66, 16, 15  # sums that each warp waits for
TABLES_US, DISPATCH_US, COMBINE_US, EXPERTS_US = 8, 480, 480, 50
LATE_RANK = 3


class Recorder:
    def __init__(self):
        self.slices, self.arrows = [], []

    def add(self, name, rank, blocks, warps, begin, end, peer=-1):
        """Adds one slice for each of the blocks and warps; returns the indices."""
        first = sum(map(len, self.slices))
        block, warp = (grid.reshape(-1) for grid in np.meshgrid(np.arange(blocks), np.arange(warps), indexing="ij"))
        new = np.zeros(len(block), SLICE)
        new["name"], new["rank"], new["block"], new["warp"], new["peer"] = NAMES.index(name), rank, block, warp, peer
        new["begin_ns"], new["end_ns"], new["instant"] = 1000 * begin, 1000 * end, name == "signal"
        new["token"] = -1
        self.slices.append(new)
        return first + np.arange(len(new))

    def timeline(self):
        pairs = np.array(self.arrows).reshape(-1, 2)
        found = np.empty(len(pairs), ARROW)
        found["source"], found["sink"] = pairs.T
        about = {"operations": NAMES[:2], "configuration": {"num_ranks": NUM_RANKS}}
        return Timeline(np.concatenate(self.slices), found, NAMES, about)


def call(late_us):
    """Both halves at once, as on a GPU: from the start every rank waits for all others."""
    r = Recorder()
    begins = [late_us if rank == LATE_RANK else 0 for rank in range(NUM_RANKS)]
    everyone = max(begins)
    combine = everyone + DISPATCH_US + EXPERTS_US
    signals = {}
    for rank, begin in enumerate(begins):
        r.add("dispatch", rank, NUM_BLOCKS, NUM_WARPS, begin, everyone + DISPATCH_US)
        r.add("route", rank, 1, 1, begin + 1, begin + TABLES_US - 2)
        r.add("combine", rank, NUM_BLOCKS, NUM_WARPS, combine, combine + COMBINE_US)
        signals[rank] = r.add("signal", rank, 1, 1, combine + 2, combine + 2)[0]
    for rank, begin in enumerate(begins):
        for peer in set(range(NUM_RANKS)) - {rank}:
            if begins[peer] + TABLES_US > begin + 1:
                r.add("table_wait", rank, NUM_BLOCKS, 1, begin + 1, begins[peer] + TABLES_US, peer)
            for begun in np.linspace(combine, combine + COMBINE_US, NUM_SUMS, endpoint=False):
                ended = begun + COMBINE_US / NUM_SUMS
                waits = r.add("partial_wait", rank, NUM_BLOCKS, NUM_WARPS, begun + 2, ended, peer)
                r.arrows += [(signals[peer], wait) for wait in waits]
    return r.timeline()


@pytest.mark.parametrize(
    ("late_us", "words"),
    [(2000, f"Rank {LATE_RANK} comes late to dispatch"), (0, "No single culprit")],
)
def test_a_wait_of_few_threads_counts_as_one_of_many(late_us, words):
    timeline = call(late_us)
    nobody = np.zeros((NUM_RANKS, NUM_RANKS)), np.zeros(0)
    assert blame.culprit(timeline, arrows.causes(timeline), *nobody).startswith(words)


def test_an_expert_is_hot_by_its_choices_too():
    """Rows chosen by several experts of a rank arrive once. Regression: profiling/trace_skewed_routing.py sent rank 0 1.3 times
    the mean of rows and 1.5 times that of choices, and its expert was not named."""
    rows = np.array([[10, 8, 8, 8]] * 4)
    choices = np.array([30, 5, 8, 8, 8, 8, 8, 8])  # two experts on each of 4 ranks
    assert blame._hot_expert(rows, choices, 0).startswith("Expert 0 on rank 0 is hot: 36.1 % of all choices")
    assert blame._hot_expert(rows, np.array([12, 11, 8, 8, 8, 8, 8, 8]), 0) is None
