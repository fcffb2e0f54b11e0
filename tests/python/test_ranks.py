"""The harness tests itself: a rank that fails, hangs or dies must neither pass nor hang a test."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist

from moe_a2a import rank_processes


def add_ranks(group, value):
    total = torch.tensor([value + dist.get_rank(group)])
    dist.all_reduce(total, group=group)
    return total.item()


def fail_on_rank_1(group):
    if dist.get_rank(group) == 1:
        raise ValueError("on purpose")
    return dist.get_rank(group)


def hang_on_rank_0(group):
    if dist.get_rank(group) == 0:
        time.sleep(1000)


def die_on_rank_1(group):
    if dist.get_rank(group) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def test_processes_return_results_in_rank_order():
    assert ranks.run_processes(3, add_ranks, 10) == [33, 33, 33]


def test_processes_show_the_traceback_of_the_rank_that_failed():
    with pytest.raises(ranks.RankError, match=r"(?s)rank 1 ---.*on purpose"):
        ranks.run_processes(2, fail_on_rank_1)


def say_on_both(report):
    print("on stdout", flush=True)
    print("on stderr", file=sys.stderr, flush=True)
    os.write(1, b"by descriptor\n")


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_the_output_of_a_rank_is_that_of_its_starter(method, capfd):
    with rank_processes.RankProcesses(1, timeout=60, method=method) as processes:
        processes.run(say_on_both, timeout=60)
    said = capfd.readouterr()
    assert said.out == "on stdout\nby descriptor\n" and said.err == "on stderr\n"


RANKS_IN_FOLDERS = """
import sys, tempfile
from moe_a2a.rank_processes import RankProcesses

for tempfile.tempdir in sys.argv[1:]:
    with RankProcesses(1, timeout=60, method="forkserver") as processes:
        processes.run(print, tempfile.tempdir, timeout=60)
"""


def folder_of_length(length, root):
    folder = root
    while len(str(folder)) < length - 102:
        folder /= "x" * 100
    folder /= "x" * (length - len(str(folder)) - 1)
    folder.mkdir(parents=True)
    assert len(str(folder)) == length
    return folder


def test_ranks_start_whatever_the_length_of_the_temporary_folder(tmp_path):
    """From 76 bytes on the fork server's socket would have 108. The only folder in which a server starts comes last."""
    root = Path(tempfile.mkdtemp(dir="/tmp"))  # tmp_path itself may be too long
    try:
        folders = [folder_of_length(length, root) for length in (300, 76, 75)]
        command = [sys.executable, "-c", RANKS_IN_FOLDERS, *map(str, folders)]
        run = subprocess.run(command, cwd=tmp_path, timeout=100, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        assert [line.split()[-1] for line in run.stdout.splitlines()] == list(map(str, folders))
        assert not any(any(folder.iterdir()) for folder in folders)
    finally:
        shutil.rmtree(root)


def test_a_fork_server_that_cannot_import_what_it_shall(tmp_path):
    """The caller got EOFError or ConnectionRefusedError: multiprocessing ignores an ImportError only."""
    (tmp_path / "broken.py").write_text("raise ValueError('broken')")
    program = """
from moe_a2a.rank_processes import RankError, RankProcesses, preload
if __name__ == "__main__":
    preload("broken")
    try:
        RankProcesses(2, timeout=20, method="forkserver")
    except RankError as error:
        print(error.kind, error)
"""
    (tmp_path / "program.py").write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, tmp_path / "program.py"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert run.stdout.startswith("died rank 0 did not start: its fork server ended, most likely while it imported "), (
        run.stderr
    )
    assert run.stdout.endswith("broken\n") and "ValueError: broken" in run.stderr


class Unreadable:
    def __reduce__(self):
        return int, ("no number",)


def return_what_cannot_be_unpickled(group):
    return Unreadable() if dist.get_rank(group) == 1 else 0


def test_a_result_that_cannot_be_unpickled_is_the_rank_s_failure():
    with pytest.raises(
        ranks.RankError, match="rank 1 returned a result that cannot be unpickled: ValueError: .*no number"
    ):
        ranks.run_processes(2, return_what_cannot_be_unpickled)


def test_processes_that_hang_are_named_and_killed():
    start = time.monotonic()
    with pytest.raises(ranks.RankError, match=r"(?s)rank 0 ---.*still running.*hang_on_rank_0"):
        ranks.run_processes(2, hang_on_rank_0, timeout=2)
    assert time.monotonic() - start < 100  # the rank sleeps for longer than this


def test_processes_that_die():
    assert ranks.run_processes(2, die_on_rank_1, mortal={1}) == ["alive", ranks.DIED]
    with pytest.raises(ranks.RankError, match="exit code -9"):
        ranks.run_processes(2, die_on_rank_1)


def test_threads_show_the_traceback_of_the_rank_that_failed():
    def program(group):
        if group.rank == 1:
            raise ValueError("on purpose")

    with pytest.raises(ranks.RankError, match=r"(?s)rank 1 ---.*on purpose"):
        ranks.run_threads(2, program)


def test_threads_that_hang_are_named():
    def program(group):
        if group.rank == 0:
            time.sleep(2)

    with pytest.raises(ranks.RankError, match=r"(?s)rank 0 ---.*still running.*sleep"):
        ranks.run_threads(2, program, timeout=0.2)


# ------------------------------------------------------------------------------ ranks that stay up


@pytest.fixture(scope="module")
def pool():
    pool = ranks.RankPool(3)
    yield pool
    pool.close()


def test_a_pool_runs_closures_on_its_first_ranks(pool):
    offset, double = 10, lambda value: 2 * value

    def program(group, value, scale=3):
        assert group.all_gather(group.rank) == list(range(group.num_ranks))
        return double(value) + scale * group.rank + offset

    assert pool.run(3, program, 1, timeout=20) == [12, 15, 18]
    assert pool.run(1, program, 2, timeout=20) == [14]
    assert pool.run(2, add_ranks_of, torch.tensor(5), timeout=20) == [11, 11]


def add_ranks_of(group, value):
    return sum(group.all_gather(value.item() + group.rank))


def test_a_pool_goes_on_after_a_rank_has_raised(pool):
    def program(group):
        assert group.rank == 0, "on purpose"

    with pytest.raises(ranks.RankError, match=r"(?s)rank 1 ---.*on purpose"):
        pool.run(2, program, timeout=20)
    assert pool.run(3, add_ranks_of, torch.tensor(5), timeout=20) == [18, 18, 18]


def test_a_pool_in_which_a_rank_dies_is_closed():
    pool = ranks.RankPool(2)
    with pytest.raises(ranks.RankError, match="exit code -9"):
        pool.run(2, die_on_rank_1_of, timeout=20)
    assert pool.is_closed


def die_on_rank_1_of(group):
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_pool_that_hangs_is_named_and_killed():
    pool = ranks.RankPool(2)

    def sleeps_on_rank_1(group):
        time.sleep(1000 * group.rank)

    start = time.monotonic()
    with pytest.raises(ranks.RankError, match=r"(?s)rank 1 ---.*still running.*sleeps_on_rank_1"):
        pool.run(2, sleeps_on_rank_1, timeout=1)
    assert pool.is_closed
    assert time.monotonic() - start < 100  # the rank sleeps for longer than this
