"""Traces of the experts' products: a tile per unit of work with its expert and rows, in the trace of the handle's owner."""

import time
from collections import Counter

import numpy as np
import pytest
import ranks
import torch

import moe_a2a
from moe_a2a.tracing.check import check_file
from moe_a2a.tracing.file_timeline import to_timeline
from moe_a2a.tracing.reading import read
from moe_a2a.tracing.summary import summarize

pytestmark = pytest.mark.cpu

NUM_RANKS, NUM_EXPERTS, NUM_TOPK, HIDDEN, INTERMEDIATE, MAX_TOKENS, NUM_CALLS = 4, 16, 2, 144, 80, 200, 2
PER_RANK = NUM_EXPERTS // NUM_RANKS
HOT_EXPERT = 5  # on rank 1
LATE_RANK, LATE_SECONDS = 1, 0.3
# Of a tile on the CPU; a gated one has half as many columns.
TILE_ROWS, TILE_COLUMNS = 64, 128


def tiles_of(rows, columns, is_gated):
    """Tiles of an expert with that many rows, and the sum of the rows of them all."""
    of_a_row = -(-columns // (TILE_COLUMNS // (2 if is_gated else 1)))
    return -(-rows // TILE_ROWS) * of_a_row, rows * of_a_row


class Program:
    def __init__(self, group, seed, hot=False, **sizes):
        self.sizes = {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "tokens": MAX_TOKENS} | sizes
        hidden, intermediate, tokens = self.sizes.values()
        self.ep = moe_a2a.ExpertParallel(
            group,
            num_experts=NUM_EXPERTS,
            num_topk=NUM_TOPK,
            hidden=hidden,
            num_max_tokens_per_rank=tokens,
            num_blocks=1,
            num_max_ll_tokens=0,
        )
        generator = torch.Generator().manual_seed(seed + self.ep.rank)

        def random(*shape):
            return torch.randn(shape, generator=generator).bfloat16()

        self.x = random(tokens, hidden)
        self.weights, self.topk_idx = torch.rand(tokens, NUM_EXPERTS, generator=generator).topk(NUM_TOPK)
        if hot:
            self.topk_idx[:, 0] = HOT_EXPERT
        self.w_gate_up, self.w_down = random(PER_RANK, 2 * intermediate, hidden), random(PER_RANK, hidden, intermediate)
        self.routes = np.zeros(PER_RANK, np.int64)  # of each local expert, over all traced calls

    def layer(self, fused_combine):
        handle = self.ep.dispatch(self.x, self.topk_idx, self.weights)
        self.routes += handle.expert_counts.numpy()[:PER_RANK]
        return self.ep.experts(handle, self.w_gate_up, self.w_down, fused=True, fused_combine=fused_combine)


def trace_layers(group, seed, fused_combine, path):
    program = Program(group, seed)
    with program.ep:
        untraced = program.layer(fused_combine)
        program.routes[:] = 0
        with moe_a2a.trace(program.ep) as trace:
            for _ in range(NUM_CALLS):
                assert torch.equal(program.layer(fused_combine), untraced)
        routes = program.routes.copy()
        program.layer(fused_combine)  # leaves nothing
        trace.save(path)
        return routes, str(trace.summary())


@pytest.mark.parametrize("fused_combine", [False, True])
@pytest.mark.parametrize("mode", [ranks.run_threads, ranks.run_processes])
def test_each_unit_of_work_leaves_one_tile(mode, fused_combine, session_seed, tmp_path):
    path = str(tmp_path / "trace.pftrace")
    results = mode(NUM_RANKS, trace_layers, session_seed, fused_combine, path)
    file = read(path)
    assert check_file(file) == []
    timeline = to_timeline(file)
    assert {str(summarize(timeline))} == {text for _, text in results}
    tiles = timeline.slices[timeline.named("tile")]
    tiles_of_expert, rows_of_expert = Counter(tiles["expert"].tolist()), Counter()
    for tile in tiles:
        assert tile["expert"] // PER_RANK == tile["rank"]
        assert 1 <= tile["rows"] <= TILE_ROWS
        rows_of_expert[int(tile["expert"])] += int(tile["rows"])
    for rank, (routes, _) in enumerate(results):
        assert routes.sum() > 0
        for local, rows in enumerate(routes):
            # Each call has the same routing.
            first, second = (
                tiles_of(rows // NUM_CALLS, columns, gated)
                for columns, gated in ((INTERMEDIATE, True), (HIDDEN, False))
            )
            expert = rank * PER_RANK + local
            assert tiles_of_expert[expert] == NUM_CALLS * (first[0] + second[0])
            assert rows_of_expert[expert] == NUM_CALLS * (first[1] + second[1])
    launches = timeline.slices[timeline.kernels()]
    names = {timeline.names[name] for name in launches["name"]}
    assert "grouped_gemm" in names and ("product_combine_send" in names) == fused_combine
    # Tiles nest in their products; one warp of a block records for all.
    inside = timeline.enclosing_kernels()[timeline.named("tile")]
    assert (inside >= 0).all()
    assert {timeline.names[name] for name in timeline.slices["name"][inside]} == {"grouped_gemm"}
    assert set(tiles["warp"].tolist()) == {0}


def run_late(group, fused_combine):
    program = Program(group, 1)
    with program.ep as ep:
        program.layer(fused_combine)
        with moe_a2a.trace(ep) as trace:
            for _ in range(2):
                handle = ep.dispatch(program.x, program.topk_idx, program.weights)
                if ep.rank == LATE_RANK:
                    time.sleep(LATE_SECONDS)
                ep.experts(handle, program.w_gate_up, program.w_down, fused=True, fused_combine=fused_combine)
        return trace.summary().culprit


@pytest.mark.alone
@pytest.mark.parametrize("fused_combine", [False, True])
def test_a_rank_that_is_late_with_its_experts_is_the_culprit(fused_combine):
    for culprit in ranks.run_threads(NUM_RANKS, run_late, fused_combine):
        assert culprit.startswith(f"Rank {LATE_RANK} comes late to combine: its experts are slow."), culprit


def record_only_handles(group, path):
    program = Program(group, 1)
    with program.ep as ep, moe_a2a.trace(ep) as trace:
        handle = ep.dispatch(program.x, program.topk_idx, program.weights)
        rows, offsets = handle.expert_row_index, handle.expert_offsets
        seen = moe_a2a.grouped_gemm(handle.recv_x, rows, offsets, program.w_gate_up, "swiglu")
        unseen = moe_a2a.grouped_gemm(handle.recv_x, rows, offsets.clone(), program.w_gate_up, "swiglu")
        assert torch.equal(seen[: handle.num_routes], unseen[: handle.num_routes])
        other = moe_a2a.grouped_gemm(program.x, None, torch.tensor([0, 100], dtype=torch.int32), program.w_gate_up[:1])
        assert other.isfinite().any()
        handle.release()
    trace.save(path)
    return int(trace.summary().operation_ns["grouped_gemm"][1][ep.rank])


def test_a_product_belongs_to_whoever_owns_its_offsets(tmp_path):
    """Ranks as threads: each finds its own object among the four that are traced in this process."""
    path = str(tmp_path / "trace.json.gz")
    assert ranks.run_threads(NUM_RANKS, record_only_handles, path) == [1] * NUM_RANKS
    assert check_file(read(path)) == []
    assert moe_a2a.grouped_gemm.__globals__["TRACED"] == []


def run_hot(group, hot, by_kernels):
    program = Program(group, 3, hot, hidden=512, intermediate=512, tokens=512)
    with program.ep as ep:

        def layer():
            handle = ep.dispatch(program.x, program.topk_idx, program.weights)
            return ep.experts(handle, program.w_gate_up, program.w_down, fused=by_kernels)

        layer()
        with moe_a2a.trace(ep) as trace:
            for _ in range(2):
                layer()
        return trace.summary().culprit


@pytest.mark.alone
def test_the_expert_whose_product_takes_longest_is_named():
    """An eighth of the work everywhere else. Its rank gets each token once, as others do; its product is why it is late."""
    for culprit in ranks.run_processes(NUM_RANKS, run_hot, True, True):
        assert culprit.startswith(f"Expert {HOT_EXPERT} on rank 1 is hot"), culprit
        assert "Its tiles are" in culprit


@pytest.mark.alone
def test_no_expert_is_named_where_all_have_the_same_to_do():
    for culprit in ranks.run_processes(NUM_RANKS, run_hot, False, True):
        assert "is hot" not in culprit
