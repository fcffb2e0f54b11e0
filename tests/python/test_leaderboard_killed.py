"""A command that is killed leaves nothing behind.

Regression: a rank that was stopped at that moment, as ranks are half of the time under pressure, stayed for ever, and the fork
server with it. What a submission had started also stayed."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import contest_cases
import pytest

pytestmark = pytest.mark.cpu

STOPPED = """
import os, signal, subprocess
def custom_kernel(data):
    child = subprocess.Popen(["sleep", "600"])
    for pid in (os.getpid(), os.getppid(), child.pid):
        open(f"{folder}/{pid}.pid", "w").close()
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_killed_command_leaves_no_process(tmp_path):
    submission = contest_cases.changed(tmp_path, f"folder = {str(tmp_path)!r}\n{STOPPED}")
    command = [sys.executable, "-m", "moe_a2a", "leaderboard", "run", "all2all", submission, "--ranks", "2"]
    process = subprocess.Popen([*command, "--device", "cpu"], start_new_session=True)
    pids = []
    try:
        end = time.monotonic() + 120
        # Two ranks, a child of each, and the fork server; both ranks are stopped.
        while len(pids) < 5 or sum(contest_cases.state(pid) == "T" for pid in pids) < 2:
            assert time.monotonic() < end and process.poll() is None, pids
            time.sleep(0.05)
            pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
        process.kill()
        process.wait()
        assert contest_cases.left_running(pids) == []
    finally:
        for pid in (*pids, process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
