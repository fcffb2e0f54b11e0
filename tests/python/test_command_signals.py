"""A stopped command leaves nothing behind: no process, no temporary folder, no traceback."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

COMMANDS = {
    "demo": ("demo", "--models", "mixtral", "--ranks", "2"),
    "bench": ("bench", "dispatch_combine", "--ranks", "2", "--device", "cpu", "--iterations", "100000"),
}
WAIT_SECONDS = 120
# How the ranks start follows from the length of the temporary folder's path: in the long one no fork server can listen.
FOLDERS = {"forked": "t", "spawned": "t" * 100}
# In which ranks that have just started meet and work, on all cores. The spawned import PyTorch first.
SECONDS_TO_WORK = {"forked": 0.7, "spawned": 3}


def descendants(pid):
    """The descendants of a process with their start times, which distinguish processes that reuse a pid."""
    found = {}
    for child in children_of(pid):
        found |= {child: start_of(child), **descendants(child)}
    return found


def children_of(pid):
    try:
        tasks = [(task / "children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:  # it has just ended
        return []
    return [int(child) for children in tasks for child in children.split()]


def start_of(pid):
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def until(condition):
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@pytest.fixture
def short_folder():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # tmp_path may be too long for a fork server's socket
        yield Path(folder)


@pytest.fixture
def heeds_signals():
    """Shells start background jobs with SIGINT ignored, nohup with SIGHUP; pytest, the command and its ranks would inherit that."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("heeds_signals")
@pytest.mark.parametrize(
    ("command", "stop", "to_group", "code", "ranks_are_up", "start"),
    [
        ("bench", signal.SIGTERM, False, 143, False, "forked"),
        ("bench", signal.SIGTERM, False, 143, True, "spawned"),
        ("bench", signal.SIGINT, True, 130, False, "forked"),
        ("bench", signal.SIGINT, True, 130, True, "forked"),
        ("bench", signal.SIGHUP, True, 129, False, "forked"),
        ("bench", signal.SIGHUP, True, 129, True, "forked"),
        ("bench", signal.SIGKILL, False, -9, False, "forked"),
        ("bench", signal.SIGKILL, False, -9, True, "forked"),
        ("bench", signal.SIGKILL, False, -9, True, "spawned"),
        ("demo", signal.SIGTERM, False, 143, True, "forked"),
    ],
)
def test_nothing_is_left(tmp_path, short_folder, command, stop, to_group, code, ranks_are_up, start):
    if command == "demo":
        pytest.importorskip("transformers")
    temporary, output = short_folder / FOLDERS[start], tmp_path / "output"
    temporary.mkdir()
    # multiprocessing's tracker, its fork server, which imports PyTorch first, and two ranks; the spawned need no server.
    num_processes = (4 if start == "forked" else 3) if ranks_are_up else 2
    arguments = [*COMMANDS[command], *(("--output", output) if command == "demo" else ())]
    process = subprocess.Popen(
        [sys.executable, "-m", "moe_a2a", *map(str, arguments)],
        # PyTorch deliberately keeps a cache in the temporary folder.
        env=os.environ | {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        until(lambda: process.poll() is not None or len(descendants(process.pid)) >= num_processes)
        assert process.poll() is None, process.stderr.read()
        if ranks_are_up:
            time.sleep(SECONDS_TO_WORK[start])  # stopping at any point must do no harm
        children = descendants(process.pid)
        os.killpg(process.pid, stop) if to_group else os.kill(process.pid, stop)
        out, err = process.communicate(timeout=WAIT_SECONDS)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code, err
    if stop != signal.SIGKILL:  # a child that was just starting reports that its parent is gone
        assert "Traceback" not in err, err
    until(lambda: not any(began == start_of(pid) for pid, began in children.items()))
    until(lambda: not list(temporary.iterdir()))
