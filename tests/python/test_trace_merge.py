"""From raw records to a timeline: synthetic records with planted clocks and planted stories."""

import numpy as np
import pytest
import synthetic_trace as synthetic

from moe_a2a.tracing.merge import merge
from moe_a2a.tracing.records import decode
from moe_a2a.tracing.summary import summarize
from moe_a2a.tracing.timeline import merged as merge_intervals

pytestmark = pytest.mark.cpu

WRONG_CLOCKS = {"clock_offset_ns": [0, 5_000_000, -7_000, 10**15], "clock_drift": [0, 1e-5, 0, -2e-5]}
ROW_BYTES = 128


def merged(plan):
    return merge(synthetic.simulate(plan), synthetic.configuration(plan), ROW_BYTES)


def test_every_field_survives_the_record():
    (rank,) = synthetic.simulate(synthetic.Plan(num_ranks=1, num_tokens=3, num_calls=1))
    columns = decode(rank)
    kinds = [rank.kinds[k] for k in columns.kind]
    assert columns.segment.tolist() == sorted(columns.segment)
    assert kinds.count("signal") == 6 and kinds.count("kernel") == 8
    signals = columns.kind == rank.kinds.index("signal")
    assert set(columns.peer[signals]) == {0} and set(columns.token[signals]) == {0, 1, 2}
    assert (columns.duration[signals] == 0).all() and (columns.duration[~signals] > 0).all()
    assert (columns.token[columns.kind == rank.kinds.index("lists")] == -1).all()


@pytest.mark.parametrize("seed", range(4))
def test_clocks_that_are_wrong_by_days_give_the_timeline_of_right_ones(seed):
    story = {"late_ns": [0, 0, 300_000, 0], "seed": seed}
    right, wrong = merged(synthetic.Plan(**story)), merged(synthetic.Plan(**story, **WRONG_CLOCKS))
    errors = np.array([rank["clock_error_ns"] for rank in wrong.about["ranks"]])
    allowed = errors + np.array([rank["clock_error_ns"] for rank in right.about["ranks"]]) + 2
    assert errors.max() < 1500
    for edge in ("begin_ns", "end_ns"):
        away = np.abs(wrong.slices[edge] - right.slices[edge])
        assert (away <= allowed[right.slices["rank"]]).all()
    assert (wrong.arrows == right.arrows).all()
    assert wrong.about["arrows_backwards"] == 0


def test_causality_makes_clocks_better(monkeypatch):
    monkeypatch.setattr(synthetic, "FLIGHT", 100)  # less than the clocks' error
    plan = synthetic.Plan(late_ns=[0, 0, 300_000, 0], slow_send=[3, 1, 2, 1])
    better = merged(plan)
    monkeypatch.setattr("moe_a2a.tracing.clocks.tighten", lambda clocks, slack: None)
    measured = merged(plan)
    error_of = [np.array([r["clock_error_ns"] for r in t.about["ranks"]]) for t in (better, measured)]
    assert (error_of[0] <= error_of[1]).all() and (error_of[0] < error_of[1]).any()


def test_each_wait_for_a_row_or_a_sum_has_the_arrow_of_its_own_call():
    timeline = merged(synthetic.Plan(slow_send=[1, 6, 1, 1], num_calls=3))
    slices, arrows = timeline.slices, timeline.arrows
    waits = np.flatnonzero(timeline.named("row_wait", "partial_wait"))
    assert len(waits) > 20 and sorted(arrows["sink"]) == waits.tolist()
    assert len(set(arrows["source"])) == len(arrows)
    source, sink = slices[arrows["source"]], slices[arrows["sink"]]
    assert (source["token"] == sink["token"]).all()
    assert (source["peer"] == sink["rank"]).all() and (source["rank"] == sink["peer"]).all()
    latency = sink["end_ns"] - source["begin_ns"]
    assert latency.max() < 3_000  # of the same call: the calls are 100 us apart


def test_a_full_segment_is_reported_and_gives_no_wrong_arrows():
    plan = {"slow_send": [1, 6, 1, 1], "num_calls": 3}
    timeline, whole = merged(synthetic.Plan(**plan, capacity=100)), merged(synthetic.Plan(**plan))
    assert all(rank["records_dropped"] > 0 for rank in timeline.about["ranks"])
    attempted = [[rank["records_attempted"] for rank in t.about["ranks"]] for t in (timeline, whole)]
    assert attempted[0] == attempted[1] == [rank["records_written"] for rank in whole.about["ranks"]]
    source, sink = (timeline.slices[timeline.arrows[end]] for end in ("source", "sink"))
    assert len(source) > 0 and (sink["end_ns"] - source["begin_ns"]).max() < 3_000
    assert "dropped" in str(summarize(timeline))


def test_the_critical_path_takes_all_of_the_time():
    timeline = merged(synthetic.Plan(late_ns=[0, 0, 300_000, 0]))
    summary = summarize(timeline)
    assert sum(step.duration_ns for step in summary.path) == summary.span_ns
    late = sum(s.duration_ns for s in summary.path if s.rank == 2 and s.kind == "(before the launch)")
    assert late >= 600_000  # two calls, 300 us each


@pytest.mark.parametrize("late", range(4))
def test_the_wait_matrix_has_each_wait_for_each_rank(late):
    timeline = merged(synthetic.Plan(late_ns=[300_000 * (rank == late) for rank in range(4)]))
    summary, lengths = summarize(timeline), {}
    for s in timeline.slices:
        if timeline.names[s["name"]].endswith("_wait"):
            lengths.setdefault((s["rank"], s["peer"]), []).append(s["end_ns"] - s["begin_ns"])
    for pair in np.ndindex(4, 4):
        assert summary.wait_sum[pair] == sum(lengths.get(pair, [])), pair
        assert summary.wait_max[pair] == max(lengths.get(pair, [0])), pair
    assert (np.delete(summary.wait_max[:, late], late) > 250_000).all()


@pytest.mark.parametrize("story", ["plain", "late", "hot", "last", "slow experts"])
def test_the_culprit_is_named(story):
    plans = {
        "plain": ({}, "No culprit"),
        "late": ({"late_ns": [0, 0, 300_000, 0]}, "Rank 2 comes late to dispatch"),
        "hot": ({"hot_expert": 5}, "Expert 5 on rank 1 is hot"),
        "last": ({"slow_send": [1, 1, 1, 12]}, "Rank 3 sends last in dispatch"),
        "slow experts": ({"late_combine_ns": [400_000, 0, 0, 0]}, "Rank 0 comes late to combine"),
    }
    plan, begins = plans[story]
    assert summarize(merged(synthetic.Plan(**plan, **WRONG_CLOCKS))).culprit.startswith(begins)


def test_threads_of_a_warp_that_wait_together_count_once():
    timeline = merged(synthetic.Plan(slow_send=[1, 6, 1, 1]))
    alone = summarize(timeline)
    waits = timeline.slices[timeline.named("row_wait", "table_wait")]
    shorter = waits.copy()
    shorter["begin_ns"] += (waits["end_ns"] - waits["begin_ns"]) // 3
    timeline.slices = np.concatenate([timeline.slices, *[waits] * 16, *[shorter] * 15])
    together = summarize(timeline)
    assert (together.wait_share == alone.wait_share).all() and (together.wait_share <= 1).all()
    assert (together.block_imbalance == alone.block_imbalance).all()
    assert together.culprit.startswith("Rank 1 sends last")
    assert (together.wait_max == alone.wait_max).all()


def test_unions_of_intervals():
    rng = np.random.default_rng(0)
    groups, begins = rng.integers(0, 5, 200) << 40, rng.integers(-500, 500, 200)
    ends = begins + rng.integers(0, 12, 200)
    union = merge_intervals(groups, begins, ends)
    for group in np.unique(groups):
        own = groups == group
        covered = {t for b, e in zip(begins[own], ends[own], strict=True) for t in range(b, e)}
        pieces = [(b, e) for g, b, e in zip(*union, strict=True) if g == group]
        assert sorted(covered) == [t for b, e in pieces for t in range(b, e)]
        assert all(a[1] < b[0] for a, b in zip(pieces, pieces[1:], strict=False))
