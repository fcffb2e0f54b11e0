"""Rows in pieces have several signals of one key. Regression: within the clocks' error a later piece's signal seemed as good
as the right one; on 4 H200 a third of the arrows pointed backwards, and Perfetto drops those silently."""

import re
import time

import numpy as np
import ranks
import torch

import moe_a2a
from moe_a2a.tracing import arrows
from moe_a2a.tracing.check import check_file
from moe_a2a.tracing.file_timeline import to_timeline
from moe_a2a.tracing.reading import read
from moe_a2a.tracing.summary import summarize
from moe_a2a.tracing.timeline import SLICE, Timeline

NAMES = ["dispatch_send", "dispatch_recv", "signal", "row_wait"]
ERROR_NS = np.array([300.0, 300.0])
CALL_NS = 100_000


def slice_of(name, rank, warp, begin, end, peer=-1, token=-1):
    one = np.zeros(1, SLICE)
    one["name"], one["rank"], one["warp"], one["begin_ns"], one["end_ns"] = NAMES.index(name), rank, warp, begin, end
    one["peer"], one["token"] = peer, token
    return one


def call(at, signals, wait_ends):
    """Rank 0 sends token 0 in pieces, rank 1 waits for each of them in a different warp."""
    slices = [slice_of("dispatch_send", 0, 0, at, at + 3_000)]
    slices += [slice_of("signal", 0, 0, at + t, at + t, peer=1, token=0) for t in signals]
    for warp, end in enumerate(wait_ends):
        slices += [slice_of("dispatch_recv", 1, warp, at, at + 3_000)]
        slices += [slice_of("row_wait", 1, warp, at + 100, at + end, peer=0, token=0)]
    return slices


def matched(*slices):
    """(time of the signal, end of the wait) of each arrow."""
    timeline = Timeline(np.concatenate(slices), np.empty(0, arrows.ARROW), NAMES, {"operations": NAMES[:2]})
    found = arrows.match(timeline, ERROR_NS, np.zeros(2, bool))
    s = timeline.slices
    return sorted(zip(s["begin_ns"][found["source"]].tolist(), s["end_ns"][found["sink"]].tolist(), strict=True))


def test_each_piece_has_the_signal_before_its_wait_ended():
    assert matched(*call(0, [1_000, 1_400], [1_300, 1_750])) == [(1_000, 1_300), (1_400, 1_750)]


def test_clocks_may_put_the_right_signal_behind_the_wait_of_a_later_call():
    slices = call(0, [1_000], [1_300]) + call(CALL_NS, [1_000], [900])
    assert matched(*slices) == [(1_000, 1_300), (CALL_NS + 1_000, CALL_NS + 900)]


def test_a_row_in_pieces_is_one_row_of_its_call():
    """Regression: the balance of 128 tokens reported four times the actual number of rows."""
    slices = [*call(0, [1_000, 1_400, 1_500], [1_750]), *call(CALL_NS, [1_000, 1_400, 1_500], [1_750])]
    about = {"operations": NAMES[:2], "configuration": {"num_ranks": 2}}
    timeline = Timeline(np.concatenate(slices), np.empty(0, arrows.ARROW), NAMES, about)
    assert summarize(timeline).tokens.tolist() == [[0, 2], [0, 0]]


NUM_CALLS, NUM_TOKENS, HIDDEN = 3, 5, 1100  # rows of three pieces
LATE_SECONDS = 0.1


def trace_small_batches(group, path, late_rank=-1):
    config = {"num_experts": 4, "num_topk": 2, "hidden": HIDDEN, "num_max_tokens_per_rank": 8, "dtype": torch.float32}
    with moe_a2a.ExpertParallel(group, **config, num_max_ll_tokens=8) as ep:
        x, topk_idx = torch.randn(NUM_TOKENS, HIDDEN), torch.tensor([[0, 2]] * NUM_TOKENS)
        with moe_a2a.trace(ep) as trace:
            for _ in range(NUM_CALLS):
                if group.rank == late_rank:
                    time.sleep(LATE_SECONDS)
                handle = ep.dispatch(x, topk_idx)
                ep.combine(torch.zeros(handle.capacity, HIDDEN), handle)
        trace.save(path)
        return str(trace.summary())


def test_rows_of_ll_words_are_pieces_in_a_real_trace(tmp_path):
    path = str(tmp_path / "trace.json")
    ranks.run_threads(2, trace_small_batches, path)
    file = read(path)
    assert check_file(file) == []
    timeline = to_timeline(file)
    names = np.array(timeline.names)[timeline.slices["name"]]
    # Each piece of a token goes to both ranks, and a sum of it comes back from both.
    assert np.count_nonzero(names == "signal") == 2 * NUM_CALLS * NUM_TOKENS * 3 * (2 + 2)
    assert summarize(timeline).tokens.tolist() == [[NUM_CALLS * NUM_TOKENS] * 2] * 2


def test_a_rank_that_comes_late_with_a_small_batch_is_not_said_to_be_slow_to_send(tmp_path):
    """Regression: 2 H200, 128 tokens, one rank 2 ms late: "sends last in dispatch". The choices of a small batch leave no
    record, so the waits for them had no cause, and only the later waits for rows counted."""
    summaries = ranks.run_threads(2, trace_small_batches, str(tmp_path / "trace.json"), 1)
    for summary in summaries:
        assert "Rank 1 comes late to dispatch" in summary
        late = re.search(r"rank 1 +dispatch_send +\(before the launch\) +([0-9.]+)", summary)
        assert late and float(late[1]) > NUM_CALLS * LATE_SECONDS * 1e6 / 2, "on the critical path"
