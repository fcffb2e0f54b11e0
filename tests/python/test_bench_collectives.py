"""`python -m moe_a2a bench all_reduce | reduce_scatter | all_gather`: its columns, its check, its baselines."""

import json

import commands
import pytest

pytestmark = pytest.mark.cpu

TINY = ("--device", "cpu", "--ranks", "2", "--sizes", "4,40000", "--iterations", "2", "--warm-up", "1")


def bench(kind: str, *options: str) -> str:
    done = commands.run("bench", kind, *TINY, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_all_reduce_beside_gloo(tmp_path):
    file = tmp_path / "all_reduce.json"
    options = ("--algorithms", "auto,ring", "--codecs", "q4", "--dtype", "bfloat16", "--json", str(file))
    table = bench("all_reduce", *options)
    header = table.splitlines()[1].split()
    assert header == "size count type redop system time algbw busbw #wrong min avg max".split()
    lines = json.loads(file.read_text())["lines"]
    assert [line["system"] for line in lines[:4]] == ["moe_a2a auto", "moe_a2a ring", "moe_a2a two_shot q4", "gloo"]
    assert [(line["size"], line["count"]) for line in lines[::4]] == [(4, 2), (40000, 20000)]
    for line in lines:
        assert line["num_wrong"] == 0 and line["min_us"] <= line["avg_us"] <= line["max_us"]
        assert line["algbw"] == pytest.approx(line["size"] / line["time_us"] / 1e3)
        assert line["busbw"] == pytest.approx(line["algbw"])  # 2 (R - 1) / R is 1 for two ranks


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_gather"])
def test_its_halves_beside_gloo(kind, tmp_path):
    file = tmp_path / "halves.json"
    bench(kind, "--json", str(file))
    lines = json.loads(file.read_text())["lines"]
    assert [line["system"] for line in lines] == ["moe_a2a", "gloo"] * 2
    assert all(line["num_wrong"] == 0 for line in lines)
    assert lines[0]["busbw"] == pytest.approx(lines[0]["algbw"] / 2)
