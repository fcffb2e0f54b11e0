"""Traces of Collectives, and of all clients of a Communicator: phases, counts, the culprit, one consistent file."""

import time

import pytest
import ranks
import torch
from collective_calls import send_words

import moe_a2a
from moe_a2a.tracing.check import check_file
from moe_a2a.tracing.reading import read
from moe_a2a.tracing.timeline import COLLECTIVES

pytestmark = pytest.mark.cpu

LATE_SECONDS = 0.3  # much longer than a busy machine takes a thread's core away
LATE_RANK = 2
ALGORITHMS = ("one_shot", "two_shot", "ring", "recursive_doubling")
MOE = {"num_experts": 8, "num_topk": 2, "hidden": 64, "num_max_tokens_per_rank": 32}


def launches(summary) -> dict[str, list[int]]:
    return {name: counts.tolist() for name, (_, counts) in summary.operation_ns.items()}


def phases_program(group, path) -> tuple[str, dict[str, list[int]], list[str]]:
    with moe_a2a.Collectives(group, symmetric_nbytes=60_000, device="cpu", timeout=20) as coll:
        x = torch.ones(15_000)  # one slice of each
        direct = coll.empty(15_000).fill_(1)
        coll.all_reduce(x)
        with moe_a2a.trace(coll) as trace:
            for algorithm in ALGORITHMS:
                coll.all_reduce(x, algorithm=algorithm)
            send_words(coll).all_reduce(x[:5_000], algorithm="one_shot")
            coll.all_reduce(x, codec="q8")
            coll.reduce_scatter(x[: 100 * coll.num_ranks])
            coll.all_gather(x[:100])
            coll.all_reduce(direct, out=direct)
            coll.reduce_scatter(direct[: 100 * coll.num_ranks])
            coll.all_gather(x[:100], out=direct[: 100 * coll.num_ranks])
        coll.all_reduce(x)  # not recorded
        trace.save(path)
        summary = trace.summary()
        return str(summary), launches(summary), sorted(summary.kind_share)


@pytest.mark.parametrize("ending", [".json", ".pftrace"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_phases_of_each_algorithm(tmp_path, num_ranks, ending):
    path = tmp_path / f"trace{ending}"
    results = ranks.run_threads(num_ranks, phases_program, path)
    assert len({text for text, *_ in results}) == 1  # equal on every rank
    text, counts, kinds = results[0]
    expected = {f"{name}_all_reduce": 1 for name in (*ALGORITHMS, "direct")}
    expected |= dict.fromkeys(["reduce_scatter", "all_gather", "direct_reduce_scatter", "direct_all_gather"], 1)
    expected["two_shot_all_reduce"] = expected["one_shot_all_reduce"] = 2  # with a codec, and as LL words
    assert counts == {name: [count] * num_ranks for name, count in expected.items()}
    assert set(counts) <= set(COLLECTIVES)
    assert {"push", "reduce", "pull"} <= set(kinds) <= {"push", "reduce", "pull", "chunk_wait", "call_wait"}
    assert "0 dropped" in text and "rows sent" not in text and "us in each operation /launches" in text
    assert check_file(read(path)) == []


def late_program(group, size: int, name: str) -> tuple[str, dict[tuple[int, str], int]]:
    with moe_a2a.Collectives(group, symmetric_nbytes=4 * size, device="cpu", timeout=20) as coll:
        x = torch.ones(size)
        symmetric = coll.empty(size).fill_(1)
        call = {
            "direct_reduce_scatter": lambda: coll.reduce_scatter(symmetric),
            "direct_all_gather": lambda: coll.all_gather(x[: size // coll.num_ranks], out=symmetric),
        }.get(name, lambda: coll.all_reduce(x))
        call()
        with moe_a2a.trace(coll) as trace:
            for _ in range(3):
                if coll.rank == LATE_RANK:
                    time.sleep(LATE_SECONDS)
                call()
        summary = trace.summary()
        path = {}
        for step in summary.path:
            path[step.rank, step.kind] = path.get((step.rank, step.kind), 0) + step.duration_ns
        return summary.culprit, path


@pytest.mark.alone
@pytest.mark.parametrize(
    ("size", "name"),
    [
        (100, "one_shot_all_reduce"),
        (20_000, "two_shot_all_reduce"),
        (20_000, "direct_reduce_scatter"),
        (20_000, "direct_all_gather"),
    ],
)
def test_a_late_rank_is_the_culprit(size, name):
    """The critical path also leads to it: to its work before the launches."""
    for culprit, path in ranks.run_threads(4, late_program, size, name):
        assert culprit.startswith(f"Rank {LATE_RANK} comes late to {name}: it is slow before the call."), culprit
        assert max(path, key=lambda step: path[step]) == (LATE_RANK, "(before the launch)"), path


def late_words_program(group) -> str:
    with moe_a2a.Collectives(group, device="cpu", timeout=20) as coll:
        x = torch.ones(100)
        send_words(coll).all_reduce(x, algorithm="one_shot")
        with moe_a2a.trace(coll) as trace:
            for _ in range(3):
                if coll.rank == LATE_RANK:
                    time.sleep(LATE_SECONDS)
                coll.all_reduce(x, algorithm="one_shot")
        return trace.summary().culprit


@pytest.mark.alone
def test_a_rank_that_is_late_for_words_is_the_culprit():
    for culprit in ranks.run_threads(4, late_words_program):
        assert culprit.startswith(f"Rank {LATE_RANK} comes late to one_shot_all_reduce: it is slow before the call."), (
            culprit
        )


def shared_program(group) -> tuple[dict[str, list[int]], list[str], list[int]]:
    with moe_a2a.Communicator(group, device="cpu", timeout=20) as comm:
        with pytest.raises(ValueError, match=rf"the Communicator of rank {comm.rank} has no clients; make an"):
            moe_a2a.trace(comm)
        ep, coll = moe_a2a.ExpertParallel(comm, **MOE), moe_a2a.Collectives(comm)
        other = moe_a2a.Collectives(comm)
        other.close()
        weights, topk_idx = torch.rand(32, 8).topk(2)
        with moe_a2a.trace(comm) as trace:
            for _ in range(2):
                handle = ep.dispatch(torch.ones(32, 64).bfloat16(), topk_idx, weights)
                ep.combine(torch.ones(handle.capacity, 64).bfloat16(), handle)
                coll.all_reduce(torch.ones(50_000))
            with pytest.raises(RuntimeError, match=rf"rank {comm.rank} is inside another trace of this Collectives"):
                moe_a2a.trace(coll).__enter__()
        summary = trace.summary()
        for client in (ep, coll):
            assert client._trace is None
            client.close()
        first, second = moe_a2a.ExpertParallel(comm, **MOE), moe_a2a.ExpertParallel(comm, **MOE)
        with pytest.raises(ValueError, match="several ExpertParallel objects; trace one of them"):
            moe_a2a.trace(comm)
        first.close()
        second.close()
        return launches(summary), sorted(summary.kind_share), summary.tokens.sum(axis=1).tolist()


def test_all_clients_of_a_communicator():
    counts, kinds, sent = ranks.run_threads(2, shared_program)[0]
    operations = ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv", "two_shot_all_reduce")
    assert counts == {name: [2, 2] for name in operations}
    assert {"push", "reduce", "pull", "send"} <= set(kinds) and min(sent) > 0


def test_what_is_no_client_is_refused():
    with pytest.raises(TypeError, match="of=3 is a int; pass an ExpertParallel, Collectives or a Communicator"):
        moe_a2a.trace(3)
