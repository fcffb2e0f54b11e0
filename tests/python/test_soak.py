"""The random tests for as long as you like: MOE_A2A_SOAK_SECONDS=600 pytest -m slow tests/python/test_soak.py -s

Every round has a new seed, which is printed before it starts.
"""

import os
import random
import signal
import time

import pytest
import ranks
import test_back_to_back
import test_dispatch_combine
import test_faults

SECONDS = float(os.environ.get("MOE_A2A_SOAK_SECONDS", "0"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3 * SECONDS + 300),
    pytest.mark.skipif(SECONDS == 0, reason="set MOE_A2A_SOAK_SECONDS to run the soak tests"),
]


def rounds(seed):
    """Seeds for SECONDS seconds."""
    rng = random.Random(seed)
    end = time.monotonic() + SECONDS
    number = 0
    while time.monotonic() < end:
        number += 1
        seed = rng.randrange(1 << 30)
        print(f"round {number}, seed {seed}", flush=True)
        yield seed


def test_random_cases(session_seed):
    for seed in rounds(session_seed):
        test_dispatch_combine.run_random_cases(range(seed, seed + 50))


def test_back_to_back_calls(session_seed):
    for seed in rounds(session_seed):
        num_ranks = 2 + seed % 5
        num_blocks = 1 + seed % 3
        arguments = (num_ranks, num_blocks, seed, 5_000)
        ranks.run_processes(num_ranks, test_back_to_back.run_sequence_in_process, *arguments, timeout=300)


def test_kills_at_any_time(session_seed):
    slowest = 0.0
    for seed in rounds(session_seed):
        arguments = ("any time", random.Random(seed).choice([signal.SIGKILL, signal.SIGSTOP]))
        reports = ranks.run_processes(
            4, test_faults.survive_a_kill, *arguments, timeout=30, mortal={test_faults.VICTIM}
        )
        test_faults.check_reports(reports)
        others = [report for report in reports if report != ranks.DIED]
        slowest = max(slowest, *(report["elapsed"] for report in others))
        print(f"  phases {[report['phase'] for report in others]}, slowest so far {slowest:.3f} s", flush=True)
