"""`python -m moe_a2a demo`, `doctor` and `bench`: how the demo starts its ranks, and results that cannot be written."""

import errno
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time

import commands
import pytest
import rank_programs

from moe_a2a import doctor
from moe_a2a.rank_processes import RankError, RankProcesses, run_on_ranks

pytestmark = pytest.mark.cpu


def moe_a2a(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "moe_a2a", *map(str, arguments)], capture_output=True, text=True, timeout=240
    )


def test_what_the_system_refuses_is_one_line():
    """A full disk, too few open files or no temporary folder ended in a traceback, twice if it was stdout's disk."""
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "moe_a2a", "leaderboard", "list"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (1, "moe_a2a: No space left on device\n")

    def fails(options):
        raise OSError(errno.ENOENT, "No such file or directory", "/nowhere")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "run", fails)
        done = commands.run("doctor")
    assert (done.returncode, done.stderr) == (1, "moe_a2a: /nowhere: No such file or directory\n")


@pytest.mark.slow
def test_demo_checks_every_logit_and_saves_its_plot(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    done = moe_a2a("demo", "--ranks", 3, "--seed", 5, "--models", "mixtral", "--output", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    last_line = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"demo: 1 model, max \|logit difference\| \S+, all checks passed", last_line)
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert "it/s" not in done.stderr, "a progress bar, though there is no terminal"


def test_demo_fails_when_its_ranks_do_not_finish(tmp_path):
    pytest.importorskip("transformers")
    done = moe_a2a("demo", "--models", "mixtral", "--ranks", 2, "--timeout", 0.5, "--output", tmp_path)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("demo: FAILED ranks [0, 1] did not finish")


def test_doctor_tests_itself():
    done = moe_a2a("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^targets +.*cpu.* \(built in\)$", done.stdout, re.MULTILINE)
    assert re.search(r"^self test +ranks on cpu, cpu: ok, .* ms", done.stdout, re.MULTILINE)


BENCH = ("bench", "all_reduce", "--ranks", "2", "--device", "cpu", "--sizes", "1024,4096")


def test_output_that_nobody_reads():
    """Into `| head -1` the ranks print too: their tracebacks came out. With `>&-` there is no sys.stdout."""
    command = [sys.executable, "-m", "moe_a2a"]
    with subprocess.Popen([*command, *BENCH], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as bench:
        assert bench.stdout.readline().startswith("# all_reduce, 2 ranks")
        bench.stdout.close()
        assert "Traceback" not in bench.stderr.read()
    assert bench.returncode == 128 + signal.SIGPIPE
    for arguments in (BENCH, ("doctor",)):
        closed = subprocess.run(
            ["sh", "-c", '"$@" >&-', "sh", *command, *arguments], stderr=subprocess.PIPE, timeout=240
        )
        assert closed.returncode == 0, closed.stderr.decode()


def no_process_is_left():
    return not multiprocessing.active_children()


def test_ranks_report_and_return():
    heard = []
    assert run_on_ranks(2, rank_programs.report_twice, "word", timeout=60, on_progress=heard.append) == ["WORD"] * 2
    assert heard == ["word"] * 4
    assert no_process_is_left()


def test_a_rank_that_raises_is_quoted():
    with pytest.raises(RankError, match="^rank 1 raised ArithmeticError: on purpose$") as error:
        run_on_ranks(2, rank_programs.raise_on_rank_1, timeout=60)
    assert "Traceback" in error.value.details
    assert no_process_is_left()


def test_a_rank_that_dies_is_named():
    with pytest.raises(RankError, match=r"^rank \d died with exit code -6$"):
        run_on_ranks(2, rank_programs.die, timeout=60)
    assert no_process_is_left()


def test_a_death_is_the_cause_of_what_others_raise():
    with (
        RankProcesses(2, timeout=60, method="forkserver") as ranks,
        pytest.raises(RankError, match="^rank 1 died with exit code -6$") as error,
    ):
        ranks.run(rank_programs.raise_or_die_later, 0.5, timeout=60, grace=30)
    assert error.value.kind == "died" and "reset by peer" in error.value.details
    assert no_process_is_left()


def test_ranks_that_hang_are_stopped():
    start = time.monotonic()
    with pytest.raises(RankError, match=r"^ranks \[0, 1\] did not finish in time$"):
        run_on_ranks(2, rank_programs.hang, timeout=5)
    assert time.monotonic() - start < 200  # a rank hangs for longer than this
    assert no_process_is_left()


SMALL = "--hidden 16 --topk 2 --experts 4 --tokens 3 --iterations 1 --warm-up 0"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize(
    "bench",
    [
        "all_reduce --sizes 64 --iterations 1 --warm-up 0",
        f"dispatch_combine --baselines none {SMALL}",
        f"experts --intermediate 16 {SMALL}",
    ],
)
def test_results_that_find_no_room_on_the_disk(bench):
    """Regression: rank 0 raised, the others were stopped, and the traceback of each hid the figures."""
    options = f"{bench} --device cpu --ranks 2 --json /dev/full".split()
    done = commands.run("bench", *options)
    assert done.returncode == 1 and "moe_a2a" in done.stdout
    assert "bench: /dev/full cannot be written: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr and "FAILED" not in done.stdout
