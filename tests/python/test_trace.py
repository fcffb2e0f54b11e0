"""moe_a2a.trace() around real kernels: one consistent file of all ranks, and the planted culprit is named."""

import contextlib
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import ranks
import torch

import moe_a2a
from moe_a2a.tracing.check import check_file
from moe_a2a.tracing.file_timeline import to_timeline
from moe_a2a.tracing.reading import read
from moe_a2a.tracing.summary import summarize

sys.path.insert(0, str(Path(__file__).parents[2] / "profiling"))
import perfetto_ui

pytestmark = pytest.mark.cpu

NUM_RANKS, NUM_EXPERTS, NUM_CALLS, MAX_TOKENS = 4, 16, 3, 2000
# Much longer than a busy machine takes a thread's core away: otherwise that rank would rightly be the culprit.
LATE_SECONDS, SECONDS_PER_ROUTE = 0.4, 3e-3
HOT_EXPERT, SLOW_RANK, LAST_RANK = 5, 2, 3
MODES = {"threads": ranks.run_threads, "processes": ranks.run_processes}


def run_story(group, story, paths, records_per_segment=None):
    """Returns the summary, the wall time in the block and, per operation, the time that the trace recorded on this rank."""
    alone = story == "one rank sends last"  # it has all the tokens
    num_tokens = 32 if not alone else MAX_TOKENS if moe_a2a.as_group(group).rank == LAST_RANK else 0
    hidden = 8192 if alone else 64
    with moe_a2a.ExpertParallel(
        group,
        num_experts=NUM_EXPERTS,
        num_topk=2,
        hidden=hidden,
        num_max_tokens_per_rank=MAX_TOKENS,
        num_buffers=1,
        num_blocks=1,
    ) as ep:
        generator = torch.Generator().manual_seed(ep.rank)
        x = torch.randn(num_tokens, hidden, generator=generator).bfloat16()
        weights, topk_idx = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).topk(2)
        if story == "a hot expert":
            topk_idx[:, 0] = HOT_EXPERT
        y = x.new_zeros(0 if alone else NUM_RANKS * MAX_TOKENS * 2, hidden)

        def layer():
            if story == "a slow rank" and ep.rank == SLOW_RANK:
                time.sleep(LATE_SECONDS)
            handle = ep.dispatch(x, topk_idx, weights, quantize="fp8" if alone else None)  # "fp8": sending takes longer
            if story == "slow experts" and ep.rank == SLOW_RANK:
                time.sleep(LATE_SECONDS)
            if story == "a hot expert":
                time.sleep(SECONDS_PER_ROUTE * handle.num_routes)
            handle.release() if alone else ep.combine(y[: handle.capacity], handle)

        layer()
        with moe_a2a.trace(ep, records_per_segment) as trace:
            start = time.perf_counter()
            for _ in range(NUM_CALLS):
                layer()
            wall_ns = 1e9 * (time.perf_counter() - start)
        for path in paths:
            trace.save(path)
        summary = trace.summary()
        seen = {name: (int(times[ep.rank]), int(n[ep.rank])) for name, (times, n) in summary.operation_ns.items()}
        return str(summary), summary.culprit, wall_ns, seen


@pytest.mark.parametrize("mode", MODES)
def test_one_file_of_all_ranks_in_each_format(mode, tmp_path):
    paths = [str(tmp_path / f"trace{ending}") for ending in (".json.gz", ".json", ".pftrace")]
    results = MODES[mode](NUM_RANKS, run_story, "a slow rank", paths)
    texts = {text for text, *_ in results}
    assert len(texts) == 1  # equal on every rank
    for path in paths:
        file = read(path)
        assert check_file(file) == []
        assert [file.processes[p] for p in sorted(file.processes)] == [f"rank {r}" for r in range(NUM_RANKS)]
        assert {str(summarize(to_timeline(file)))} == texts
        assert file.about["arrows_backwards_beyond_clock_error"] == 0
        assert all(rank["records_dropped"] == 0 for rank in file.about["ranks"])
        assert sum(file.about["tokens_per_expert"]) == NUM_CALLS * NUM_RANKS * 32 * 2


@pytest.mark.alone
def test_slices_take_the_time_that_the_clock_on_the_wall_says():
    results = ranks.run_threads(NUM_RANKS, run_story, "a slow rank", [])
    for rank, (_, _, wall_ns, seen) in enumerate(results):
        assert {name: n for name, (_, n) in seen.items()} == {
            "dispatch_send": NUM_CALLS,
            "dispatch_recv": NUM_CALLS,
            "combine_send": NUM_CALLS,
            "combine_recv": NUM_CALLS,
        }
        inside = sum(ns for ns, _ in seen.values())
        slept = 1e9 * NUM_CALLS * LATE_SECONDS
        assert inside < wall_ns
        if rank == SLOW_RANK:
            assert inside < wall_ns - slept
        else:
            assert seen["dispatch_recv"][0] > 0.8 * slept


@pytest.mark.alone
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("story", "words"),
    [
        ("a slow rank", f"Rank {SLOW_RANK} comes late to dispatch"),
        ("a hot expert", f"Expert {HOT_EXPERT} on rank 1 is hot"),
        ("slow experts", f"Rank {SLOW_RANK} comes late to combine"),
        ("one rank sends last", f"Rank {LAST_RANK} sends last in dispatch"),
    ],
)
def test_the_culprit_is_named(mode, story, words):
    for text, culprit, *_ in MODES[mode](NUM_RANKS, run_story, story, []):
        assert culprit.startswith(words), text


def test_what_does_not_fit_is_counted(tmp_path):
    path = str(tmp_path / "trace.pftrace")
    (text, *_), *_ = ranks.run_threads(NUM_RANKS, run_story, "a slow rank", [path], 50)
    file = read(path)
    assert check_file(file) == []
    assert all(rank["records_written"] == 50 < rank["records_attempted"] for rank in file.about["ranks"])
    assert "Records were dropped" in text


def test_a_trace_has_the_capacity_that_it_asks_for(tmp_path):
    """Regression: an object kept the capacity of its largest trace. NumPy's integers were refused, or did not fit into JSON."""
    (group,) = moe_a2a.thread_group(np.int64(1))
    sizes = {"num_experts": 4, "num_topk": 2, "hidden": 16, "num_max_tokens_per_rank": 8, "num_blocks": 1}
    with moe_a2a.ExpertParallel(group, **sizes, device="cpu") as ep:
        for records in (1000, 1, np.int64(3), 2000, 2):
            with moe_a2a.trace(ep, records) as trace:
                ep.dispatch(torch.ones(4, 16, dtype=torch.bfloat16), torch.tensor([[0, 1]] * 4)).release()
            trace.save(tmp_path / "trace.json")
            (rank,) = read(tmp_path / "trace.json").about["ranks"]
            assert rank["records_attempted"] > 3
            assert rank["records_written"] == min(records, rank["records_attempted"])


def fail_inside(group, folder):
    with moe_a2a.ExpertParallel(
        group, num_experts=4, num_topk=2, hidden=64, num_max_tokens_per_rank=8, num_blocks=1, timeout=2
    ) as ep:
        x, idx = torch.ones(4, 64, dtype=torch.bfloat16), torch.tensor([[0, 3]] * 4)
        trace = moe_a2a.trace(ep)
        with pytest.raises((moe_a2a.PeerTimeoutError, ArithmeticError)), trace:
            ep.combine(x.new_zeros(64, 64), ep.dispatch(x, idx))
            if ep.rank == 1:
                raise ArithmeticError("on purpose")
            ep.dispatch(x, idx)
        trace.save(f"{folder}/trace.json.gz")


def run_fails_alone(group, folder):
    """The block of rank 1 ends with an exception: rank 0 must not wait for its clock, or both lose each other."""
    with moe_a2a.ExpertParallel(
        group, num_experts=4, num_topk=2, hidden=64, num_max_tokens_per_rank=8, timeout=20
    ) as ep:
        x = torch.ones(4, 64, dtype=torch.bfloat16, device=ep.device)
        topk_idx = torch.tensor([[0, 2]], device=ep.device).expand(4, 2).contiguous()

        def layer():
            ep.dispatch(x, topk_idx).release()
            ep.check()

        trace, start = moe_a2a.trace(ep), time.monotonic()
        with pytest.raises(ArithmeticError) if ep.rank == 1 else contextlib.nullcontext():
            with trace:
                layer()
                if ep.rank == 1:
                    raise ArithmeticError("alone")
        assert time.monotonic() - start < ranks.slack(8)
        trace.save(f"{folder}/alone.v2.json")
        with moe_a2a.trace(ep) as after:
            layer()
        after.save(f"{folder}/after.json")


def test_a_block_that_fails_on_one_rank_leaves_no_other_waiting(tmp_path):
    ranks.run_processes(2, run_fails_alone, str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"alone.v2.rank0.json", "alone.v2.rank1.json", "after.json"}


def test_after_an_exception_each_rank_saves_what_it_did_last(tmp_path):
    ranks.run_processes(2, fail_inside, str(tmp_path))
    for rank in range(2):
        file = read(tmp_path / f"trace.rank{rank}.json.gz")
        assert check_file(file) == []
        assert set(file.processes.values()) == {f"rank {rank}"}
    left = read(tmp_path / "trace.rank0.json.gz")
    (gave_up,) = (s for s in left.slices if s.name == "gave_up")
    assert gave_up.arguments["peer"] == 1


def misuse(group, path):
    with moe_a2a.ExpertParallel(group, num_experts=2, num_topk=1, hidden=8, num_max_tokens_per_rank=4) as ep:
        trace = moe_a2a.trace(ep)
        with trace:
            for read_it in (trace.summary, lambda: trace.save(path)):
                with pytest.raises(RuntimeError, match="has not ended"):
                    read_it()
            with pytest.raises(RuntimeError, match="inside another trace"), moe_a2a.trace(ep):
                pass
        for read_it in (trace.summary, lambda: trace.save(path)):
            with pytest.raises(RuntimeError, match="the trace is empty: no kernel ran inside its block"):
                read_it()
        with pytest.raises(ValueError, match="json.gz"):
            trace.save("trace.xml")
        for no_path, name in ((None, "NoneType"), (3, "int"), (b"trace.json", "bytes")):
            with pytest.raises(TypeError, match=rf"path={no_path!r} is a {name}; pass the path of a file"):
                trace.save(no_path)


@pytest.mark.parametrize(
    ("records", "error"), [(0, ValueError), (-1, ValueError), (2**31, ValueError), (True, TypeError), ("8", TypeError)]
)
def test_a_wrong_number_of_records_is_refused_by_name(records, error):
    (group,) = moe_a2a.thread_group(1)
    sizes = {"num_experts": 4, "num_topk": 2, "hidden": 16, "num_max_tokens_per_rank": 8}
    with moe_a2a.ExpertParallel(group, **sizes, device="cpu") as ep:
        with pytest.raises(error, match=rf"records_per_segment={records!r} .*on rank 0; pass "):
            moe_a2a.trace(ep, records)


class NoRoom:
    """A second client, whose trace cannot begin."""

    rank, _trace = 1, None

    def _open_core(self):
        return self

    def trace_start(self, records):
        raise RuntimeError("no memory")


@contextlib.contextmanager
def refused_by_rank_1(ep, error, match):
    expected = (
        (error, match) if ep.rank == 1 else (moe_a2a.PeerRefusedError, f"rank 1 could not begin its trace: .*{match}")
    )
    with pytest.raises(expected[0], match=expected[1]):
        yield


def begin_badly(group):
    sizes = {"num_experts": 2, "num_topk": 1, "hidden": 8, "num_max_tokens_per_rank": 4}
    with moe_a2a.ExpertParallel(group, **sizes, device="cpu", timeout=20) as ep:
        with refused_by_rank_1(ep, ValueError, "records_per_segment=0 is not in"):
            moe_a2a.trace(ep, 0 if ep.rank == 1 else None).__enter__()
        with refused_by_rank_1(
            ep, RuntimeError, "records_per_segment=65536 on rank 1: no memory; pass a smaller number"
        ):
            trace = moe_a2a.trace(ep)
            if ep.rank == 1:
                trace._clients = [ep, NoRoom()]
            trace.__enter__()
        with moe_a2a.trace(ep) as trace:
            ep.dispatch(torch.ones(1, 8).bfloat16(), torch.tensor([[0]])).release()
        assert trace.summary()
        with contextlib.nullcontext() if ep.rank == 0 else pytest.raises(RuntimeError, match="object is closed"):
            with moe_a2a.trace(ep) as trace:
                ep.dispatch(torch.ones(1, 8).bfloat16(), torch.tensor([[0]])).release()
                if ep.rank == 1:
                    ep.close()
        assert len(trace._ranks) == 1 - ep.rank


def test_a_trace_that_one_rank_cannot_begin_or_end_is_over_on_all():
    """The others waited for it until their deadline, and lost the object."""
    ranks.run_threads(2, begin_badly, timeout=30)


def test_misuse_is_refused_by_name(tmp_path):
    ranks.run_threads(2, misuse, tmp_path / "trace.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(perfetto_ui.missing() is not None, reason=f"Perfetto's UI: {perfetto_ui.missing()}")
@pytest.mark.parametrize("ending", [".json.gz", ".pftrace"])
def test_perfetto_itself_reads_it(ending, tmp_path):
    path = str(tmp_path / f"trace{ending}")
    ranks.run_threads(NUM_RANKS, run_story, "a slow rank", [path])
    file = read(path)
    with perfetto_ui.opened(path) as ui:
        assert ui.query("select name, value from stats where severity in ('error', 'data_loss') and value > 0") == []
        (count,) = ui.query("select count(*) as slices, sum(dur) as dur from slice")
        assert count["slices"] == len(file.slices) + 1  # and what it is about
        assert count["dur"] == sum(s.end_ns - s.begin_ns for s in file.slices)
        flows = ui.query(
            "select a.name as source, b.name as sink, count(*) as n, min(b.ts - a.ts) as least "
            "from flow join slice a on slice_out = a.id join slice b on slice_in = b.id group by 1, 2"
        )
        assert [(f["source"], f["sink"], f["n"]) for f in flows] == [("signal", "flight", len(file.sources))], (
            file.about
        )
        assert flows[0]["least"] >= 0
        (samples,) = ui.query("select count(*) as n from counter")
        assert samples["n"] == sum(len(times) for times, _ in file.counters.values())
        rows = [name for r in range(NUM_RANKS) for name in (f"rank {r}", f"rank {r} % of the warps that wait")]
        if ending == ".json.gz":  # has no groups: a rank is a process, and its id follows the name
            assert sorted(ui.rows()) == [f"rank {r} {1000 + r}" for r in range(NUM_RANKS)]
        else:
            assert ui.rows() == rows
