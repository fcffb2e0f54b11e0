"""Regression: 4 H200, 4096 tokens, one rank 2 ms late: "no single culprit". The time of every waiting thread was added up. One
thread per block waits for the late rank's table; thousands wait for the sums that follow, of all ranks alike, and for all of
them at the same time."""

import numpy as np
import pytest

from moe_a2a.tracing import arrows, blame
from moe_a2a.tracing.hot_expert import ExpertsWork
from moe_a2a.tracing.timeline import ARROW, SLICE, Timeline

OPERATIONS = ["dispatch", "combine", "grouped_gemm"]
NAMES = [*OPERATIONS, "route", "table_wait", "signal", "partial_wait", "tile"]
NUM_RANKS, NUM_BLOCKS, NUM_WARPS, NUM_SUMS = 4, 66, 16, 15  # sums that each warp waits for
TABLES_US, DISPATCH_US, COMBINE_US, EXPERTS_US = 8, 480, 480, 50
LATE_RANK, HOT_RANK = 3, 1
EXPERTS_OF_RANK, HOT_EXPERT = 64, 70


class Recorder:
    def __init__(self):
        self.slices, self.arrows = [], []

    def add(self, name, rank, blocks, warps, begin, end, peer=-1, expert=-1):
        """Adds one slice for each of the blocks and warps; returns the indices."""
        first = sum(map(len, self.slices))
        block, warp = (grid.reshape(-1) for grid in np.meshgrid(np.arange(blocks), np.arange(warps), indexing="ij"))
        new = np.zeros(len(block), SLICE)
        new["name"], new["rank"], new["block"], new["warp"], new["peer"] = NAMES.index(name), rank, block, warp, peer
        new["begin_ns"], new["end_ns"], new["instant"] = 1000 * begin, 1000 * end, name == "signal"
        new["token"] = new["rows"] = -1
        new["expert"] = expert
        self.slices.append(new)
        return first + np.arange(len(new))

    def timeline(self):
        pairs = np.array(self.arrows).reshape(-1, 2)
        found = np.empty(len(pairs), ARROW)
        found["source"], found["sink"] = pairs.T
        about = {"operations": OPERATIONS, "configuration": {"num_ranks": NUM_RANKS}}
        return Timeline(np.concatenate(self.slices), found, NAMES, about)


def call(late_us, hot_us=0, shows_tiles=False, experts_us=EXPERTS_US):
    """Both halves at once, as on a GPU: from the start every rank waits for all others. The experts of the hot rank take
    `hot_us` longer."""
    r = Recorder()
    begins = [late_us if rank == LATE_RANK else 0 for rank in range(NUM_RANKS)]
    everyone = max(begins)
    first = everyone + DISPATCH_US + experts_us
    combines = [first + hot_us * (rank == HOT_RANK) for rank in range(NUM_RANKS)]
    last = max(combines) + COMBINE_US
    signals = {}
    for rank, (begin, combine) in enumerate(zip(begins, combines, strict=True)):
        r.add("dispatch", rank, NUM_BLOCKS, NUM_WARPS, begin, everyone + DISPATCH_US)
        r.add("route", rank, 1, 1, begin + 1, begin + TABLES_US - 2)
        if shows_tiles:
            experts(r, rank, everyone + DISPATCH_US + 1, combine - 1, hot_us * (rank == HOT_RANK))
        r.add("combine", rank, NUM_BLOCKS, NUM_WARPS, combine, last)
        signals[rank] = r.add("signal", rank, 1, 1, combine + 2, combine + 2)[0]
    for rank, begin in enumerate(begins):
        for peer in set(range(NUM_RANKS)) - {rank}:
            if begins[peer] + TABLES_US > begin + 1:
                r.add("table_wait", rank, NUM_BLOCKS, 1, begin + 1, begins[peer] + TABLES_US, peer)
            edges = np.linspace(max(combines[rank], first), last, NUM_SUMS + 1)
            edges[1:] = np.maximum(edges[1:], combines[peer] + 3)
            for begun, ended in zip(edges[:-1], edges[1:], strict=True):
                if begun + 2 < ended:
                    waits = r.add("partial_wait", rank, NUM_BLOCKS, NUM_WARPS, begun + 2, ended, peer)
                    r.arrows += [(signals[peer], wait) for wait in waits]
    return r.timeline()


def experts(r, rank, begin, end, hot_us):
    """A product on one warp per block, behind the other blocks: a tile of each expert in turn, then the hot one's."""
    before = len(r.slices)
    r.add("grouped_gemm", rank, NUM_BLOCKS, 1, begin, end)
    tiles = np.linspace(begin, end - hot_us, EXPERTS_OF_RANK + 1)
    for e, (t0, t1) in enumerate(zip(tiles[:-1], tiles[1:], strict=True)):
        r.add("tile", rank, NUM_BLOCKS, 1, t0, t1, expert=rank * EXPERTS_OF_RANK + e)
    if hot_us:
        r.add("tile", rank, NUM_BLOCKS, 1, end - hot_us, end, expert=HOT_EXPERT)
    for slices in r.slices[before:]:
        slices["block"] += NUM_BLOCKS


def choices(hot):
    """Of 1,024 tokens per rank with top-8 of 256: an expert that 80 % of the tokens choose makes 1.3 times as much work."""
    counts = np.full(NUM_RANKS * EXPERTS_OF_RANK, 128)
    if hot:
        counts[:] = 116
        counts[HOT_EXPERT] = 3277
    return counts


@pytest.mark.parametrize(
    ("late_us", "words"),
    [(2000, f"Rank {LATE_RANK} comes late to dispatch"), (0, "No single culprit")],
)
def test_a_wait_of_few_threads_counts_as_one_of_many(late_us, words):
    assert said(call(late_us), np.zeros(0, np.int64)).startswith(words)


def said(timeline, choices):
    tokens = np.full((NUM_RANKS, NUM_RANKS), 922)
    return blame.culprit(timeline, arrows.causes(timeline), ExpertsWork.of(timeline, tokens, choices))


@pytest.mark.parametrize("shows_tiles", [True, False])
def test_a_hot_expert_is_named_though_rows_on_their_way_are_waited_for_from_all(shows_tiles):
    """4 H200, 1024 tokens, an expert with 25 times the mean: its rank comes 60 us late to combine, of 1 ms; most of the
    waits are for rows on their way, from all ranks alike."""
    text = said(call(0, 60, shows_tiles), choices(hot=True))
    assert text.startswith(
        f"Expert {HOT_EXPERT} on rank {HOT_RANK} is hot: 10.0 % of all choices (0.4 % would be even)"
    )
    assert f"for rank {HOT_RANK} to begin its combine" in text
    assert ("Its tiles are" in text) == shows_tiles


def test_a_hot_expert_is_named_though_products_take_most_of_the_time():
    """4 H100, 1024 tokens, hidden 7168: "No culprit", since the products are nine tenths of all blocks' time and nobody waits in
    them. The hot rank came 110 us late, of 1.4 ms."""
    timeline = call(0, 1800, shows_tiles=True, experts_us=60_000)
    text = said(timeline, choices(hot=True))
    assert text.startswith(f"Expert {HOT_EXPERT} on rank {HOT_RANK} is hot")
    assert f"for rank {HOT_RANK} to begin its combine" in text
    assert said(timeline, choices(hot=False)).startswith("No culprit")


def test_who_is_late_for_another_reason_has_no_hot_expert():
    """The products of all ranks take as long; the late one's host did something else."""
    timeline = call(0, 60, shows_tiles=True)
    s = timeline.slices
    s["end_ns"][timeline.named("grouped_gemm")] = s["end_ns"][timeline.named("grouped_gemm")].min()
    assert said(timeline, choices(hot=True)).startswith("No single culprit")
    assert said(call(0, 60, shows_tiles=True), choices(hot=False)).startswith("No single culprit")
    assert said(call(0, 0, shows_tiles=True), choices(hot=True)).startswith("No single culprit")


def test_an_expert_is_hot_by_its_choices_too():
    """Rows chosen by several experts of a rank arrive once. Regression: profiling/trace_skewed_routing.py sent rank 0 1.3 times
    the mean of rows and 1.5 times that of choices, and its expert was not named."""
    rows = np.array([40, 32, 32, 32])

    def explained(counts, spans_us=(100, 100, 100, 100), products_us=(0, 0, 0, 0)):
        times = (np.array(us) * 1000 for us in (spans_us, products_us))
        return ExpertsWork(rows, np.array(counts), *times, np.zeros(0, np.int64)).explanation(0)

    hot, even = [300, 50, 80, 80, 80, 80, 80, 80], [120, 110, 80, 80, 80, 80, 80, 80]
    assert explained(hot).startswith("Expert 0 on rank 0 is hot: 36.1 % of all choices")
    assert explained(even) is None
    assert explained([30, 5, 3, 3, 3, 3, 3, 3]).startswith("Expert 0")
    assert not explained([5, 3, 2, 2, 2, 2, 2, 2]).startswith("Expert")  # chance
    # Experts take as long as they have rows, or nearly so.
    assert explained(hot, (220, 100, 100, 100)) is not None
    assert explained(hot, (2000, 100, 100, 100)) is None
    assert explained(hot, (2000, 100, 100, 100), (1900, 60, 60, 60)) is not None
    assert explained(hot, (2000, 100, 100, 100), (110, 60, 60, 60)) is None
