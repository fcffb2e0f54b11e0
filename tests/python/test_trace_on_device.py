"""Traces on the session's device: the bits are those of calls without a trace, the file is consistent, and no launch or tile is
missing."""

from collections import Counter

import on_device
import pytest
import torch
from test_trace_collectives import launches

import moe_a2a
from moe_a2a.tracing.check import check_file
from moe_a2a.tracing.file_timeline import to_timeline
from moe_a2a.tracing.reading import read

pytestmark = on_device.TESTS

NUM_RANKS, NUM_EXPERTS, NUM_TOPK, HIDDEN, NUM_CALLS = 2, 8, 2, 256, 3
BATCHES = {"all as LL words": 8, "choices as LL words": 100, "a routing table": 600}
HALVES = ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv")


def random_tokens(ep, num_tokens, seed):
    generator = torch.Generator().manual_seed(seed + ep.rank)
    x = torch.randn(num_tokens, ep.hidden, generator=generator).bfloat16()
    weights, topk_idx = torch.rand(num_tokens, ep.num_experts, generator=generator).topk(NUM_TOPK)
    return x.to(ep.device), topk_idx.to(ep.device), weights.to(ep.device)


def check_trace(path):
    """Returns the timeline of the file. It may have no arrows: a wait whose signal has already arrived is not recorded."""
    file = read(path)
    assert check_file(file) == []
    assert file.about["arrows_backwards_beyond_clock_error"] == 0
    assert all(rank["records_dropped"] == 0 for rank in file.about["ranks"])
    return to_timeline(file)


def check_rows(summary, ep, tokens):
    """Each call sends a token once to every rank that owns one of its experts."""
    _, topk_idx, _ = tokens
    owners = topk_idx // ep.num_local_experts
    rows_to = [int((owners == rank).any(dim=1).sum()) for rank in range(ep.num_ranks)]
    assert summary.tokens[ep.rank].tolist() == [NUM_CALLS * rows for rows in rows_to]


def make_layer(ep, tokens, quantize=None, wire=None):
    x, topk_idx, weights = tokens
    y = torch.ones(ep.num_ranks * ep.num_max_tokens_per_rank, ep.hidden, dtype=ep.dtype, device=ep.device)

    def layer():
        handle = ep.dispatch(x, topk_idx, weights, quantize=quantize)
        return ep.combine(handle.recv_x if quantize is None else y, handle, presummed=True, wire=wire)

    return layer


def trace_dispatches(group, num_tokens, options, seed, path):
    with moe_a2a.ExpertParallel(
        group, num_experts=NUM_EXPERTS, num_topk=NUM_TOPK, hidden=HIDDEN, num_max_tokens_per_rank=num_tokens
    ) as ep:
        tokens = random_tokens(ep, num_tokens, seed)
        layer = make_layer(ep, tokens, **options)
        untraced = layer()
        with moe_a2a.trace(ep) as trace:
            outputs = [layer() for _ in range(NUM_CALLS)]
        assert all(torch.equal(output, untraced) for output in outputs)
        check_rows(trace.summary(), ep, tokens)
        trace.save(path)
        return launches(trace.summary())


@pytest.mark.parametrize("options", [{}, {"quantize": "fp8", "wire": "q8"}], ids=["bf16", "fp8, q8"])
@pytest.mark.parametrize("batch", BATCHES)
def test_each_dispatch_and_combine(batch, options, session_seed, tmp_path):
    path = str(tmp_path / "trace.pftrace")
    for counts in on_device.run(NUM_RANKS, trace_dispatches, BATCHES[batch], options, session_seed, path):
        for name in ("dispatch", "combine") if on_device.IS_GPU else HALVES:
            assert counts[name] == [NUM_CALLS] * NUM_RANKS
    check_trace(path)


def trace_replays(group, seed, path):
    with moe_a2a.ExpertParallel(
        group, num_experts=NUM_EXPERTS, num_topk=NUM_TOPK, hidden=HIDDEN, num_max_tokens_per_rank=100
    ) as ep:
        tokens = random_tokens(ep, 100, seed)
        layer = make_layer(ep, tokens)
        untraced = layer()
        with moe_a2a.trace(ep) as trace:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = layer()
            for _ in range(NUM_CALLS):
                output.fill_(float("nan"))
                graph.replay()
                assert torch.equal(output, untraced)
        graph.replay()  # its kernels still record: to memory that the object keeps
        ep.check()
        check_rows(trace.summary(), ep, tokens)
        trace.save(path)
        return launches(trace.summary())


@on_device.gpu_only
def test_replays_of_a_graph_that_was_captured_in_the_block(session_seed, tmp_path):
    path = str(tmp_path / "trace.pftrace")
    for counts in on_device.run(NUM_RANKS, trace_replays, session_seed, path):
        assert counts["dispatch"] == counts["combine"] == [NUM_CALLS] * NUM_RANKS
    check_trace(path)


def trace_experts(group, fused_combine, seed, path):
    """Returns the routes of each local expert."""
    with moe_a2a.ExpertParallel(
        group,
        num_experts=NUM_EXPERTS,
        num_topk=NUM_TOPK,
        hidden=HIDDEN,
        num_max_tokens_per_rank=300,
        num_max_ll_tokens=0,
    ) as ep:
        tokens = random_tokens(ep, 300, seed)
        generator = torch.Generator().manual_seed(seed + 100 + ep.rank)
        weights = [
            torch.randn(ep.num_local_experts, *shape, generator=generator).to(ep.device, ep.dtype)
            for shape in ((2 * 80, HIDDEN), (HIDDEN, 80))
        ]
        counts = []

        def layer():
            handle = ep.dispatch(*tokens)
            counts.append(handle.expert_counts.clone())
            return ep.experts(handle, *weights, fused=True, fused_combine=fused_combine)

        untraced = layer()
        with moe_a2a.trace(ep) as trace:
            outputs = [layer() for _ in range(NUM_CALLS)]
        assert all(torch.equal(output, untraced) for output in outputs)
        trace.save(path)
        return counts[0].tolist()


@pytest.mark.parametrize("fused_combine", [False, True])
def test_the_tiles_of_an_expert_hold_all_its_rows(fused_combine, session_seed, tmp_path):
    path = str(tmp_path / "trace.pftrace")
    routes = on_device.run(NUM_RANKS, trace_experts, fused_combine, session_seed, path)
    timeline = check_trace(path)
    rows_of_expert = Counter()
    for tile in timeline.slices[timeline.named("tile")]:
        rows_of_expert[int(tile["expert"])] += int(tile["rows"])
    expected = {expert: count for expert, count in enumerate(sum(routes, [])) if count}
    assert rows_of_expert.keys() == expected.keys()
    # Every expert has as many columns of tiles, in both products together.
    columns = {rows_of_expert[expert] / (NUM_CALLS * count) for expert, count in expected.items()}
    assert len(columns) == 1 and columns.pop() >= 2


def trace_collectives(group, path):
    with moe_a2a.Collectives(group, symmetric_nbytes=1 << 20) as coll:
        x = torch.arange(30_000, device=coll.device).remainder(7).bfloat16()
        direct, sums = (coll.empty(30_000, dtype=torch.bfloat16) for _ in range(2))
        direct.copy_(x)
        calls = [
            *(lambda name=name: coll.all_reduce(x, algorithm=name) for name in ("one_shot", "two_shot", "ring")),
            lambda: coll.all_reduce(x, algorithm="recursive_doubling"),
            lambda: coll.all_reduce(x, codec="q8"),
            lambda: coll.all_reduce(direct, algorithm="direct", out=sums),
            lambda: coll.reduce_scatter(x),
            lambda: coll.all_gather(x),
        ]
        untraced = [call() for call in calls]
        with moe_a2a.trace(coll) as trace:
            outputs = [call() for call in calls]
        assert all(torch.equal(output, expected) for output, expected in zip(outputs, untraced, strict=True))
        trace.save(path)
        return launches(trace.summary())


def test_each_collective(tmp_path):
    path = str(tmp_path / "trace.pftrace")
    names = ["one_shot", "two_shot", "ring", "recursive_doubling", "direct"]
    expected = dict.fromkeys([f"{name}_all_reduce" for name in names] + ["reduce_scatter", "all_gather"], 1)
    expected["two_shot_all_reduce"] = 2  # with a codec
    for counts in on_device.run(NUM_RANKS, trace_collectives, path):
        assert counts == {name: [count] * NUM_RANKS for name, count in expected.items()}
    check_trace(path)
