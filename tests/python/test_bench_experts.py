"""`python -m moe_a2a bench experts | layer | training`: its lines, its check, its baselines, at toy sizes on the CPU."""

import json

import commands
import pytest
import torch

from moe_a2a.__main__ import main
from moe_a2a.bench import limits, start
from moe_a2a.bench.report import compare

pytestmark = pytest.mark.cpu

TINY = (
    "--device", "cpu", "--ranks", "2", "--tokens", "5,40", "--hidden", "64", "--topk", "3", "--experts", "8",
    "--intermediate", "32", "--iterations", "2", "--warm-up", "1",
)  # fmt: skip
PEERS = ["torch._grouped_mm"] if hasattr(torch, "_grouped_mm") else []


def bench(kind, *options):
    done = commands.run("bench", kind, *TINY, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_experts(tmp_path):
    table = bench("experts", "--results", str(tmp_path))
    assert "no figure: DeepGEMM, DeepGEMM fp8: DeepGEMM runs on GPUs" in table
    (file,) = tmp_path.glob("*_2/experts.json")
    results = json.loads(file.read_text())
    assert results["about"]["ranks"] == 2 and "commit" in results["about"]["versions"]
    lines = results["lines"]
    systems = ["moe_a2a", "moe_a2a fp8", *PEERS]
    combined = {system: ("down, combine", "down+combine") for system in systems if system not in PEERS}
    expected = [(n, s, p) for n in (5, 40) for s in systems for p in ("gate_up", "down", *combined.get(s, ()))]
    assert [(line["tokens"], line["system"], line["product"]) for line in lines] == expected
    for line in lines:
        limit = results["limits"][(5, 40).index(line["tokens"])]
        assert (line["columns"], line["depth"]) == ((64, 64) if line["product"] == "gate_up" else (64, 32))
        flops = 2 * line["rows"] * line["columns"] * line["depth"]
        assert line["tflops"] == pytest.approx(1e-6 * flops / line["us"])
        assert limit["float8_tflops"] is None  # on the CPU torch._scaled_mm is slower than what it would bound
        least = max(line["tflops"] / limit["tflops"], line["tbps"] / limit["tbps"])
        assert line["share_of_limit"] == pytest.approx(least)
        assert line["sm_mhz"] is None and line["kernel"] is None  # GPU only


def test_layer(tmp_path):
    file = tmp_path / "layer.json"
    table = bench("layer", "--json", str(file), "--routing", "uniform,idle_rank")
    assert "no figure: moe_a2a + DeepGEMM, moe_a2a + DeepGEMM fp8: DeepGEMM runs on GPUs" in table
    lines = json.loads(file.read_text())["lines"]
    ours = [name + how for name in ("moe_a2a", "moe_a2a fp8") for how in ("", ", combine fused")]
    systems = [*ours, "moe_a2a, step by step", *(f"moe_a2a + {peer}" for peer in PEERS)]
    assert [(line["tokens"], line["system"]) for line in lines] == [(n, s) for n in (5, 40) for s in systems] * 2
    for line in lines:
        assert 0 < line["us"] <= line["p99_us"] * 1.001 and line["launch"] == "eager"
        assert line["dtype"] == ("float8" if "fp8" in line["system"] else "bfloat16")
        if PEERS and line["dtype"] == "bfloat16":
            peer = next(other["us"] for other in lines[lines.index(line) :] + lines if other["system"] == systems[-1])
            assert line["of_best_peer"] == pytest.approx(line["us"] / peer)


def test_training(tmp_path):
    """Each of ours has passed a comparison of its output and its four gradients with the peer's, or it would have no line."""
    file = tmp_path / "training.json"
    table = bench("training", "--json", str(file), "--routing", "uniform,idle_rank,one_rank")
    assert "no figure" not in table
    lines = json.loads(file.read_text())["lines"]
    systems = ["sort + all_to_all", "moe_a2a", "moe_a2a, num_max_routes"]
    assert [(line["tokens"], line["system"]) for line in lines] == [(n, s) for n in (5, 40) for s in systems] * 3
    for number, line in enumerate(lines):
        peer = lines[number - number % len(systems)]
        assert line["of_peer"] == pytest.approx(line["us"] / peer["us"])
        assert line["forward_us"] > 0 < line["us"] <= line["p99_us"] * 1.001


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--hidden", "40"), "--hidden 40"),
        (("--intermediate", "40"), "40 is not a multiple of 16"),
        (("--dtype", "float32"), "float32"),
        (("--experts", "7"), "num_experts=7"),
    ],
)
@pytest.mark.parametrize("kind", ["experts", "layer", "training"])
def test_refused_before_any_rank_starts(monkeypatch, capsys, kind, options, words):
    def run_on_ranks(*arguments, **more):
        raise AssertionError("ranks were started")

    monkeypatch.setattr(start, "run_on_ranks", run_on_ranks)
    try:
        code = main(["bench", kind, *TINY, *options])
    except SystemExit as end:  # argparse
        code = end.code
    assert code == 2 and words in capsys.readouterr().err


def test_wrong_results_are_seen():
    exact = torch.randn(20, 30)
    compare("", exact.bfloat16(), exact, 1e-2)
    for wrong in (exact.roll(1, 0), exact * 1.05, exact.clone().index_fill_(0, torch.tensor([2]), torch.nan)):
        with pytest.raises(ArithmeticError):
            compare("", wrong, exact, 1e-2)


def test_the_limit_is_the_slower_of_products_and_bytes():
    limit = limits.Limits(tflops=2.0, tbps=0.5)
    assert limit.seconds(4e12, 0.1e12) == 2.0 and limit.seconds(1e12, 3e12) == 6.0
    assert limits.Limits(2.0, 0.5, 4.0).seconds(4e12, 0, True) == 1.0 and limit.seconds(4e12, 0, True) == 2.0


def test_data_parallel(tmp_path):
    """Each call's results and each model's losses have been compared with the peer's, or ours would have no line."""
    tiny = ("--ranks", "2", "--device", "cpu", "--iterations", "2", "--warm-up", "1")
    sizes = ("--sizes", "4096", "--hidden", "16", "--layers", "2", "--tokens", "8")
    done = commands.run("bench", "data_parallel", *tiny, *sizes, "--results", tmp_path)
    assert done.returncode == 0 and "no figure" not in done.stdout, done.stdout + done.stderr
    (file,) = tmp_path.glob("*_2/data_parallel.json")
    lines = json.loads(file.read_text())["lines"]
    calls = ["all_reduce", "all_reduce, async_op", "all_gather_into_tensor", "reduce_scatter_tensor"]
    what = [*calls, "DDP, hidden 16", "FSDP2, hidden 16"]
    assert [(line["what"], line["backend"]) for line in lines] == [(w, b) for w in what for b in ("gloo", "moe_a2a")]
    for theirs, ours in zip(lines[::2], lines[1::2], strict=True):
        assert theirs["of_peer"] == 1 and ours["of_peer"] == pytest.approx(ours["us"] / theirs["us"])
        assert ours["nbytes"] == (4096 if ours["what"] in calls else 16 * 2 * 16**2)
        assert ours["p99_us"] * 1.001 >= ours["us"] > 0 < ours["host_us"]


def test_micro_batches(tmp_path):
    """On the CPU nothing overlaps; checks the contents of one line."""
    tiny = [option for i, option in enumerate(TINY) if "--intermediate" not in (TINY[i], TINY[i - 1])]
    files = ("--results", tmp_path, "--trace", tmp_path / "turns.json")
    done = commands.run("bench", "micro_batches", *tiny, "--blocks", "1,2", *files)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("on the CPU nothing overlaps"), done.stdout
    (file,) = tmp_path.glob("*_2/micro_batches.json")
    lines = json.loads(file.read_text())["lines"]
    found = [(line["tokens"], line["blocks"], line["product"]) for line in lines]
    assert found == [(n, b, p) for n in (5, 40) for b in (1, 2) for p in ("linear", "grouped_gemm")]
    for line in lines:
        share = 1 - line["blocks"] / (line["blocks"] + 1)
        assert line["slower"] == pytest.approx(line["in_turn_us"] / line["product_us"] - 1)
        assert line["beyond"] == pytest.approx((1 + line["slower"]) * share - 1)
        assert line["hidden_share"] == pytest.approx(1 - (line["turn_us"] - line["limited_us"]) / line["transfer_us"])
        assert 0 < line["in_turn_us"] < line["turn_us"]
    assert json.loads((tmp_path / "turns.json").read_text())["traceEvents"]
