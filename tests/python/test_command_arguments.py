"""Bad options of every command: one line that says what to pass, exit code 2, and nothing is started."""

import json
import os

import pytest

from moe_a2a.__main__ import main
from moe_a2a.tables import tuned_files

pytestmark = pytest.mark.cpu

BENCH = ("bench", "dispatch_combine", "--device", "cpu")
SMALL = ("--ranks", "2", "--experts", "8", "--topk", "2", "--hidden", "16", "--tokens", "4")


def refused(capsys, *arguments):
    """Returns the line."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as end:  # argparse
        code = end.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, ""), (code, out, err)
    assert err.count("\n") == 1 and err.endswith("\n") and "Traceback" not in err, err
    return err


@pytest.fixture(autouse=True)
def no_rank_is_started(monkeypatch):
    from moe_a2a.bench import start

    def run_on_ranks(*arguments, **more):
        raise AssertionError("ranks were started")

    monkeypatch.setattr(start, "run_on_ranks", run_on_ranks)


@pytest.mark.parametrize("command", [BENCH, ("tune", "--device", "cpu"), ("tune", "--print"), ("demo",)], ids=" ".join)
@pytest.mark.parametrize("value", ["0", "-1", "-3", "65", "x", "1.5", "", "9" * 30])
def test_bad_numbers_of_ranks(capsys, command, value):
    assert "--ranks" in refused(capsys, *command, "--ranks", value)


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_gather"])
def test_algorithms_and_codecs_of_another_collective(capsys, kind):
    """Regression: they were ignored."""
    assert f"--algorithms ring: {kind} has" in refused(capsys, "bench", kind, "--algorithms", "auto,ring,direct")
    assert f"--codecs q8: {kind} has no codecs" in refused(capsys, "bench", kind, "--codecs", "q8")


@pytest.mark.parametrize("command", [BENCH, ("tune",)], ids=" ".join)
@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--iterations", ["0", "-1", "x", "2000000000"]),  # regression: a rank ran out of memory for its times
        ("--warm-up", ["-1"]),
        ("--seed", ["-1", "x"]),
        ("--timeout", ["0", "-1", "nan", "inf", "x"]),
        ("--hidden", ["0", "-5"]),
        ("--topk", ["0"]),
        ("--experts", ["0"]),
        ("--tokens", ["0", "", "1,,2", "...", "1,...", "1,2,...", "4,2,...,64", "1,2,...,2000000000000", "1,1,...,5"]),
        ("--blocks", ["-1", "1,-2", "1,2,3,...,100000000"]),
        ("--dtype", ["int8", ""]),
        ("--device", ["gpu"]),
    ],
)
def test_bad_numbers_of_other_options(capsys, command, option, values):
    for value in values:
        assert option in refused(capsys, *command, f"{option}={value}"), value


@pytest.mark.parametrize("option", ["--modes", "--routing", "--baselines", "--suite"])
def test_names_that_do_not_exist(capsys, option):
    assert option in refused(capsys, *BENCH, option, "nonsense")


@pytest.mark.parametrize("routing", ["zipf:x", "zipf:nan", "zipf:inf", "zipf:-1"])
def test_zipf_exponents_out_of_range(capsys, routing):
    assert "--routing" in refused(capsys, *BENCH, *SMALL, "--routing", routing)


@pytest.mark.parametrize("command", [BENCH, ("tune", "--device", "cpu"), ("tune", "--print", "--device", "cpu")])
def test_sizes_that_no_rank_would_take(capsys, command):
    assert "--topk 9 > --experts 8" in refused(capsys, *command, *SMALL, "--topk", 9)
    assert "num_experts=9" in refused(capsys, *command, *SMALL, "--experts", 9)
    assert "num_topk=1000" in refused(capsys, *command, *SMALL, "--topk", 1000)
    assert "num_max_tokens_per_rank" in refused(capsys, *command, *SMALL, "--tokens", 10**9)


@pytest.mark.parametrize(
    "command",
    [(*BENCH, *SMALL, "--graph"), (*BENCH, *SMALL, "--chain"), ("bench", "all_reduce", "--device", "cpu", "--graph")],
)
def test_the_cpu_has_no_graphs(capsys, command):
    """The table had no lines of graphs, and did not say why."""
    assert f"{command[-1]}: the CPU has no graphs" in refused(capsys, *command)


@pytest.mark.parametrize("kind, mib", [("experts", 48), ("layer", 48), ("training", 144)])
def test_experts_that_do_not_fit_into_memory(capsys, monkeypatch, kind, mib):
    """The default sizes on the CPU: the kernel ended processes, after minutes in which nothing else had memory."""
    from moe_a2a.bench import machine

    assert (machine.available_memory() or 1 << 30) > 0
    command = (
        "bench",
        kind,
        "--device",
        "cpu",
        "--ranks",
        2,
        "--experts",
        8,
        "--topk",
        2,
        "--hidden",
        1024,
        "--intermediate",
        1024,
    )
    monkeypatch.setattr(machine, "available_memory", lambda: mib << 20)
    with pytest.raises(AssertionError, match="ranks were started"):
        refused(capsys, *command)
    monkeypatch.setattr(machine, "available_memory", lambda: (mib << 20) - 1)
    assert (
        f"the experts of all ranks take {mib} MiB or more, and {mib - 1} MiB of memory are available; pass smaller --experts, "
        "--intermediate or --hidden" in refused(capsys, *command)
    )


@pytest.mark.parametrize("kind, mib", [("all_reduce", 2 * (4 + 3 * 8)), ("all_gather", 2 * (4 + 4 + 2 * 8))])
def test_tensors_that_do_not_fit_into_memory(capsys, monkeypatch, kind, mib):
    """Regression: the kernel ended a rank, or another process; that rank's peers said no more than where they waited."""
    from moe_a2a.bench import machine

    command = ("bench", kind, "--device", "cpu", "--ranks", 2, "--sizes", f"64,{4 << 20}")  # 2**20 values of 4 bytes
    monkeypatch.setattr(machine, "available_memory", lambda: mib << 20)
    with pytest.raises(AssertionError, match="ranks were started"):
        refused(capsys, *command)
    monkeypatch.setattr(machine, "available_memory", lambda: (mib << 20) - 1)
    text = refused(capsys, *command)
    assert f"--sizes {4 << 20}: the tensors of all ranks and the check of their values take {mib} MiB or more" in text
    assert f"{mib - 1} MiB of memory are available; pass smaller --sizes or --ranks" in text


def test_limits_are_exact(capsys):
    """It was 2.14748e+09."""
    assert "'0' is not an integer from 1 to 2147483647" in refused(capsys, *BENCH, "--tokens", 0)


def test_sizes_of_which_a_rank_has_nothing(capsys):
    """Regression: a table was written for 5 bytes, measured with 8, which every call went by."""
    text = refused(capsys, "tune", "collectives", "--device", "cpu", "--ranks", 4, "--sizes", "5,1024")
    assert "--sizes 5: less than 8 bytes, an element of bfloat16 for each of 4 ranks" in text


def test_the_routing_of_a_text_has_few_choices(capsys):
    assert "--topk 9" in refused(capsys, *BENCH, *SMALL, "--experts", 16, "--topk", 9, "--routing", "text")


def test_a_suite_that_the_ranks_do_not_divide(capsys):
    assert "num_ranks=3" in refused(capsys, "bench", "dispatch_combine", "--suite", "cpu", "--ranks", 3)


def unwritable(tmp_path, name="below.json"):
    """Names that nobody can write, not even root."""
    (tmp_path / "file").touch()
    return [tmp_path / "file" / name, f"/proc/{name}"]


def test_a_demo_on_more_ranks_than_its_text_has_sequences(capsys):
    """Regression: a rank without a sequence failed in its model, after half a minute."""
    assert "--ranks 64: the text has 11 sequences" in refused(capsys, "demo", "--ranks", 64)


def test_files_that_cannot_be_written(capsys, tmp_path, monkeypatch):
    for path in [*unwritable(tmp_path), tmp_path]:
        assert "--json" in refused(capsys, *BENCH, *SMALL, "--json", path)
        assert str(path) in refused(capsys, "tune", "--device", "cpu", *SMALL, "--output", path)
    (tmp_path / "folder.png").mkdir()
    monkeypatch.setattr(tuned_files, "OWN", unwritable(tmp_path, "cache")[0])
    assert "cannot be written: Not a directory; pass --output" in refused(capsys, "tune", "--device", "cpu", *SMALL)
    for path in [*unwritable(tmp_path, "below.png"), tmp_path / "folder.png"]:
        text = refused(capsys, "trace", "any.json", "--plot", path)
        assert "--plot" in text and "pass a path" not in text


@pytest.mark.parametrize("name", ["x.foo", "x", "x.png.gz", ".png"])
def test_a_picture_of_no_known_format(capsys, tmp_path, name):
    """Regression: matplotlib's traceback, or a picture under another name."""
    text = refused(capsys, "trace", "any.json", "--plot", tmp_path / "new" / name)
    assert "--plot" in text and "pass a path that ends in one of .png, .svg, .pdf, .jpg" in text
    assert not (tmp_path / "new").exists()


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("command", [BENCH, ("bench", "all_reduce", "--device", "cpu"), ("tune", "--device", "cpu")])
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"MASTER_ADDR": None, "MASTER_PORT": None}, "are set without MASTER_ADDR and MASTER_PORT"),
        ({"MASTER_ADDR": ""}, "are set without MASTER_ADDR;"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT: 'x' is not an integer from 0 to 65535"),
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE: 'x' is not an integer from 1 to 64"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE: '0' is not an integer from 1 to 64"),
        ({"RANK": ""}, "RANK: '' is not an integer from 0 to 1"),
        ({"RANK": "2"}, "RANK: '2' is not an integer from 0 to 1"),
    ],
    ids=str,
)
def test_an_environment_that_is_not_that_of_torchrun(capsys, monkeypatch, command, changed, words):
    """Regression: tracebacks of int() and of torch.distributed."""
    for name, value in (TORCHRUN | changed).items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    text = refused(capsys, *command)
    assert words in text and text.endswith("; start the ranks with torchrun, or unset RANK and WORLD_SIZE\n")


@pytest.mark.parametrize("command", [BENCH, ("bench", "all_reduce", "--device", "cpu"), ("tune", "--device", "cpu")])
def test_another_number_of_ranks_than_torchrun_has_started(capsys, monkeypatch, command):
    """Regression: two ranks were measured, although three were asked for."""
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert "--ranks 3, but torchrun has started 2" in refused(capsys, *command, "--ranks", 3)


def test_folders_that_cannot_be_written(capsys, tmp_path):
    for path in unwritable(tmp_path):
        assert "--results" in refused(capsys, *BENCH, *SMALL, "--results", path)
        assert "--output" in refused(capsys, "demo", "--output", path)
        assert "--out" in refused(capsys, "bench", "plot", "any.json", "--out", path)


def test_default_folders_that_cannot_be_written(capsys, monkeypatch):
    """Regression: only folders that were named were checked, so the work was done before its plot or report was lost."""
    monkeypatch.chdir("/proc")
    assert "--output: 'moe_a2a_demo' cannot be written" in refused(capsys, "demo")
    assert "--out: 'moe_a2a_leaderboard' cannot be written" in refused(capsys, "leaderboard", "rank", "all_reduce")


def test_no_folder_without_permission(capsys, tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    tmp_path.chmod(0o500)
    assert "--json" in refused(capsys, *BENCH, *SMALL, "--json", tmp_path / "results.json")


def test_a_launch_table_that_is_none(capsys, tmp_path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"tables": [{"hidden": "64"}]}))
    assert f"{path}: tables[0].hidden" in refused(capsys, "tune", "--print", "--device", "cpu", "--output", path)
    assert f"{path}: tables[0].hidden" in refused(capsys, "tune", "--device", "cpu", *SMALL, "--output", path)


def test_files_that_cannot_be_read(capsys, tmp_path):
    for content, place in (
        ("{}", "about"),
        ("[", "JSON"),
        ('{"about": {"machine": "", "name": ""}, "records": [{}]}', "part"),
    ):
        path = tmp_path / "results.json"
        path.write_text(content)
        text = refused(capsys, "bench", "plot", path)
        assert place in text and "pass a file that `python -m moe_a2a bench dispatch_combine --json` wrote" in text
    assert "No such file" in refused(capsys, "bench", "plot", tmp_path / "missing.json")
    assert "No such file" in refused(capsys, "trace", tmp_path / "missing.json")
    assert "no trace" not in refused(capsys, "trace", path)


def test_a_command_is_needed(capsys):
    assert "command" in refused(capsys)
    assert "nonsense" in refused(capsys, "nonsense")
    assert "what" in refused(capsys, "bench")


def test_device_of_the_environment(capsys, monkeypatch):
    monkeypatch.setenv("MOE_A2A_DEVICE", "gpu")
    assert "MOE_A2A_DEVICE" in refused(capsys, "tune", "--print")
