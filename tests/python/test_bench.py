"""`python -m moe_a2a bench` and `tune`: what they write, what they refuse to write, and the launch table they produce."""

import argparse
import json
from pathlib import Path

import commands
import pytest
import ranks
import torch
import torch.distributed as dist

import moe_a2a
from moe_a2a.bench import gate, plot, routings, run_case
from moe_a2a.bench.cases import Case, Traffic, make_inputs
from moe_a2a.bench.clock import Measuring
from moe_a2a.bench.contenders import MODES, Ours, OursInHalves
from moe_a2a.bench.records import Results
from moe_a2a.bench.torch_baselines import SortAllToAll
from moe_a2a.commands.command_line import integers
from moe_a2a.tables import launch_tables
from moe_a2a.tables.launch_tables import LaunchStep, TunedTable

pytestmark = pytest.mark.cpu

TINY = ("--device", "cpu", "--hidden", 64, "--experts", 8, "--topk", 3, "--iterations", 2, "--warm-up", 1)
CASE = Case(num_tokens=7, hidden=48, num_topk=3, num_experts=8, dtype=torch.bfloat16, routing="zipf:1.2", seed=3)
STEPS = {"dispatch", "combine", "total"}
HALVES = {"dispatch_send", "dispatch_recv", "combine_send", "combine_recv"}


def moe_a2a_command(*arguments):
    done = commands.run(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# ---- the command


@pytest.fixture(scope="module")
def results_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    options = ("--ranks", 2, "--tokens", "2,5", "--routing", "uniform,zipf:1.2,one_rank,idle_rank")
    table = moe_a2a_command(
        "bench", "dispatch_combine", *TINY, *options, "--modes", ",".join(MODES), "--halves", "--overlap",
        "--results", folder,
    )  # fmt: skip
    assert "deep_ep_v2, deep_ep_v2_fp8: deep_ep runs on GPUs" in table
    return folder / "cpu_2" / "dispatch_combine.json"


def test_records_hold_what_a_reader_needs(results_file):
    results = Results.read(results_file)
    assert {"machine", "driver", "date", "seed", "versions"} <= results.about.keys()
    assert {r.routing for r in results.records} == {"uniform", "zipf:1.2", "one_rank", "idle_rank"}
    assert {r.step for r in results.records} == STEPS | HALVES
    assert {r.mode for r in results.records if r.system == "moe_a2a"} == set(MODES)
    assert {r.system for r in results.records} == {
        "moe_a2a", "sort + all_to_all, gloo", "all_gather + reduce_scatter, gloo",
        "bare all_gather + reduce_scatter, gloo",
    }  # fmt: skip
    for r in results.records:
        assert 0 < r.median_us <= r.p99_us or r.step == "total"
        assert (r.gbps is None) == (r.step in HALVES)
        assert r.ranks == 2 and r.hidden == 64 and r.host_us is None
    fp8 = next(r for r in results.records if (r.mode, r.step, r.routing) == ("fp8", "dispatch", "one_rank"))
    assert fp8.remote_bytes == 2 * (64 + 4), "two tokens of rank 1 go to rank 0, a byte a value and a scale"
    assert {o["step"] for o in results.overlaps} == {"dispatch", "combine"}
    assert results.floors and all(floor["microseconds"] > 0 for floor in results.floors)


def test_plots_are_drawn(results_file, tmp_path):
    pytest.importorskip("matplotlib")
    other = tmp_path / "one_rank.json"
    moe_a2a_command(
        "bench", "dispatch_combine", *TINY, "--ranks", 1, "--tokens", "2,5", "--baselines", "none", "--json", other
    )
    blocks = tmp_path / "blocks.json"
    content = json.loads(other.read_text())
    for record in content["records"]:
        record |= {"part": "blocks", "gbps": 1.0, "remote_bytes": 1000}
    blocks.write_text(json.dumps(content))
    moe_a2a_command("bench", "plot", results_file, other, blocks, "--out", tmp_path)
    for name in ("time_against_tokens", "bandwidth_against_blocks", "scaling_over_ranks"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_committed_results_can_be_plotted(tmp_path):
    """Regression: docs/tuning.md's command refused a file of ours, and named the first file's machine above the others' times."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    folder = Path(__file__).parents[2] / "bench/results"
    files = sorted(folder.glob("*/dispatch_combine.json")) + sorted(folder.glob("h200_*/with_deep_ep.json"))
    assert plot.run(argparse.Namespace(files=files, out=tmp_path)) == 0
    results = [Results.read(path) for path in files]
    assert results[0].about["machine"] != "NVIDIA H200"
    figure = plot._scaling_over_ranks(results)
    assert figure.get_suptitle().startswith("NVIDIA H200: hidden 7168")
    pyplot.close("all")


def test_progressions_are_written_with_dots():
    parse = integers(1)
    assert parse("3,1") == [3, 1]
    assert parse("1,2,4,...,64") == [1, 2, 4, 8, 16, 32, 64]
    assert parse("8,16,24,...,40") == [8, 16, 24, 32, 40]
    assert parse("8,16,24,...,45") == [8, 16, 24, 32, 40, 45]


# ---- the gate


class OneBitOff(Ours):
    def combine(self, y, handle):
        out = super().combine(y, handle)
        if self.ep.rank == 1:
            out.view(torch.int16)[2, 5] ^= 1
        return out


class TwoExpertsSwapped(Ours):
    """The effect of an expert list in the wrong order."""

    def experts(self, handle):
        y = super().experts(handle)
        y[[0, len(y) - 1]] = y[[len(y) - 1, 0]]
        return y


class Raises(Ours):
    def experts(self, handle):
        if self.ep.rank == 1:
            raise ArithmeticError("on purpose")
        return super().experts(handle)


def gate_on_rank(group):
    inputs = make_inputs(CASE, torch.device("cpu"))
    with moe_a2a.ExpertParallel(group, **CASE.config, device="cpu") as ep:
        right = [gate.check(kind(ep, inputs, mode), inputs) for mode in MODES for kind in (Ours, OursInHalves)]
        wrong = [gate.check(kind(ep, inputs), inputs) for kind in (OneBitOff, TwoExpertsSwapped, Raises)]
        return right, wrong, push_lands(ep, inputs)


def push_lands(ep, inputs):
    """Pushed rows are where dispatch would put them; True, or what is wrong."""
    handle = ep.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights)
    landed, rows = handle.recv_rows.clone().long(), handle.recv_x.clone()
    core = ep._open_core()
    pushes = Traffic.of(inputs).dispatch
    core.push_rows(inputs.x[pushes[:, 1]], pushes, "warp_stores", 2)
    dist.barrier()
    empty = ep.dispatch(inputs.x[:0], inputs.topk_idx[:0])  # takes the buffer of the push
    mine = torch.arange(len(rows)) // CASE.num_tokens == ep.rank
    remote = landed[~mine[landed]]
    is_same = bool(len(remote)) and torch.equal(empty.recv_x[remote], rows[remote])
    empty.release()
    handle.release()
    return is_same


def test_the_gate_lets_nothing_wrong_through():
    for right, wrong, lands in ranks.run_processes(2, gate_on_rank):
        assert right == [None] * len(right)
        assert "rank 1: WrongResultError: 1 of 336 values, first at token 2, column 5" in wrong[0]
        assert "WrongResultError" in wrong[1]
        assert wrong[2] == "rank 1: ArithmeticError: on purpose"
        assert lands


class NotMade(SortAllToAll):
    def __init__(self, case, inputs):
        if inputs.rank == 1:
            raise ArithmeticError("on purpose")
        super().__init__(case, inputs)


class RefusesToCombine(SortAllToAll):
    name = "refuses"

    def combine(self, y, handle):
        raise ArithmeticError("not today")


def case_with_broken_peers_on_rank(group):
    run_case.BASELINES |= {"not_made": NotMade, "refuses": RefusesToCombine}
    plan = run_case.Plan("tokens", (CASE,), ("rows",), baselines=("not_made", "refuses", "sort"))
    results = Results({})
    run_case.run(CASE, plan, Measuring(iterations=2, warm_up=1), torch.device("cpu"), results)
    return [record.system for record in results.records], results.left_out


def test_a_peer_that_fails_is_a_line_of_the_table_and_stops_nobody():
    for systems, left_out in ranks.run_processes(2, case_with_broken_peers_on_rank):
        assert set(systems) == {"moe_a2a", "sort + all_to_all, gloo"}
        assert left_out == [
            {"what": "not_made", "case": str(CASE), "why": "rank 1: ArithmeticError: on purpose"},
            {"what": "refuses, gloo, rows, eager", "case": str(CASE), "why": "rank 0: ArithmeticError: not today"},
        ]


# ---- routings


def test_routings_are_what_they_say():
    sizes = routings.Sizes(num_ranks=4, num_tokens=500, num_experts=32, num_topk=4)

    def idx(name, rank):
        return routings.topk_idx(name, sizes, rank, seed=5)

    for name in ("uniform", "zipf:1.0"):
        assert all(len(set(row)) == 4 for row in idx(name, 2).tolist()), "distinct experts"
    share = [idx("zipf:1.0", rank).flatten().bincount(minlength=32) / 2000 for rank in range(2)]
    assert share[0].argmax() == share[1].argmax() and 0.1 < share[0].max() < 0.25
    assert idx("one_rank", 3).max() < 8
    assert [len(idx("idle_rank", rank)) for rank in range(4)] == [500, 500, 500, 0]
    assert torch.equal(idx("uniform", 1), idx("uniform", 1)) and not torch.equal(idx("uniform", 1), idx("uniform", 2))
    with pytest.raises(ValueError, match="unknown"):
        routings.checked("random")


def test_text_routing_maps_the_routers_experts():
    pytest.importorskip("transformers")
    sizes = routings.Sizes(num_ranks=2, num_tokens=300, num_experts=256, num_topk=8)
    idx = routings.topk_idx("text", sizes, 1, seed=1)
    assert idx.shape == (300, 8) and idx.min() >= 0 and idx.max() < 256
    assert set((idx[:4] % 4).T[0].tolist()) == {0, 1, 2, 3}, "an expert of the router stands for four"
    assert "router with 64 experts, top-8" in routings.note("text", sizes)


# ---- the launch table


def test_blocks_come_from_call_object_file_or_environment(tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    launch_tables.write(path, {}, TunedTable(16, "float32", (LaunchStep(4, 2, 3), LaunchStep(8, 3, 2))))
    sizes = {"num_experts": 4, "num_topk": 2, "hidden": 16, "num_max_tokens_per_rank": 8, "dtype": torch.float32}
    (group,) = moe_a2a.thread_group(1)

    def blocks(**arguments):
        with moe_a2a.ExpertParallel(group, **sizes, device="cpu", **arguments) as ep:
            return [ep.blocks_for(tokens) for tokens in (1, 4, 5, 8)]

    assert blocks() == [(1, 1)] * 4
    assert blocks(launch_table=path) == [(2, 3), (2, 3), (3, 2), (3, 2)]
    monkeypatch.setenv(launch_tables.ENVIRONMENT_VARIABLE, str(path))
    assert blocks() == [(2, 3), (2, 3), (3, 2), (3, 2)]
    monkeypatch.setenv(launch_tables.ENVIRONMENT_VARIABLE, str(tmp_path / "missing.json"))
    with pytest.raises(ValueError, match="missing.json"):
        blocks()


def test_a_table_serves_rows_of_another_length(tmp_path):
    path = tmp_path / "table.json"
    launch_tables.write(path, {}, TunedTable(1024, "bfloat16", (LaunchStep(8, 2, 2), LaunchStep(64, 9, 9))))
    launch_tables.write(path, {}, TunedTable(4096, "bfloat16", (LaunchStep(8, 5, 6),)))
    launch_tables.write(path, {}, TunedTable(4096, "bfloat16", (LaunchStep(8, 7, 8),)))  # in the place of the older one

    def steps(hidden, dtype):
        return launch_tables.in_effect(torch.device("cpu"), 2, hidden, dtype, 2, path)[0]

    assert steps(4096, torch.bfloat16) == [(8, 7, 8)]
    assert steps(1024, torch.bfloat16) == steps(512, torch.float32) == [(8, 2, 2), (64, 9, 9)]
    assert steps(1024, torch.float32) == [(4, 2, 2), (32, 9, 9)], "twice the bytes: half the tokens"


def test_the_model_grows_with_the_bytes():
    steps = launch_tables.model(num_ranks=4, num_topk=8, row_bytes=14336, most_blocks=132)
    fewest = launch_tables.FEWEST_BLOCKS
    assert (steps[0].dispatch_blocks, steps[0].combine_blocks) == (fewest, fewest)
    assert (steps[-1].dispatch_blocks, steps[-1].combine_blocks) == (fewest, 132)
    small = [step for step in steps if step.max_tokens <= launch_tables.LARGEST_SMALL_BATCH]
    assert small[-1].dispatch_blocks * launch_tables.WARPS_PER_BLOCK >= 128 * 15  # a warp per piece, and per token
    assert all(a.dispatch_blocks <= b.dispatch_blocks for a, b in zip(small, small[1:], strict=False))
    assert [step.max_tokens for step in steps] == sorted({step.max_tokens for step in steps})
    assert [step.combine_blocks for step in steps] == sorted(step.combine_blocks for step in steps)
    blocks = [(step.dispatch_blocks, step.combine_blocks) for step in steps]
    assert all(a != b for a, b in zip(blocks, blocks[1:], strict=False))


def test_tune_writes_a_table_that_is_found(tmp_path):
    path = tmp_path / "table.json"
    sizes = ("--hidden", 64, "--experts", 8, "--topk", 3)
    moe_a2a_command("tune", *TINY, "--ranks", 2, "--tokens", "1,4", "--blocks", "1,2", "--output", path)
    (table,) = launch_tables.read(path)
    assert (table.hidden, table.dtype) == (64, "bfloat16") and table.steps[-1].max_tokens == 4
    printed = moe_a2a_command("tune", "--print", "--device", "cpu", *sizes, "--output", path)
    assert str(path) in printed and printed.splitlines()[-1].split() == [str(n) for n in table.steps[-1]]


def test_a_table_that_cannot_be_written_is_printed(tmp_path):
    """Regression: what had been measured was lost with the file."""
    path = tmp_path / ("t" * 250)  # a name for a file, but too long with the suffix that it has until it is complete
    done = commands.run("tune", *TINY, "--ranks", 2, "--tokens", 4, "--blocks", 1, "--output", path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"tune: {path} cannot be written: File name too long" in done.stderr
    assert done.stdout.split() == "tokens at most dispatch blocks combine blocks 4 1 1".split()
