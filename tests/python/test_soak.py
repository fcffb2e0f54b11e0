"""The random tests for as long as you like, and 100,000 consecutive calls:

    MOE_A2A_SOAK_SECONDS=600 pytest -m slow tests/python/test_soak.py -s
    MOE_A2A_SOAK_ITERATIONS=100000 pytest tests/python/test_soak.py -k iterations -s

Every round has a new seed, which is printed before it starts. With MOE_A2A_TEST_DEVICE=cuda on GPUs.
"""

import os
import random
import signal
import time

import on_device
import pytest
import ranks
import soak
import test_back_to_back
import test_dispatch_combine
import test_faults
from lost_ranks import VICTIM

pytestmark = on_device.TESTS

SECONDS = float(os.environ.get("MOE_A2A_SOAK_SECONDS", "0"))


def for_seconds(test):
    test = pytest.mark.skipif(SECONDS == 0, reason="set MOE_A2A_SOAK_SECONDS to run the soak tests")(test)
    return pytest.mark.slow(pytest.mark.timeout(3 * SECONDS + 300)(test))


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


@for_seconds
def test_random_cases(session_seed):
    for seed in rounds(session_seed):
        test_dispatch_combine.run_random_cases(range(seed, seed + 50))


@for_seconds
@on_device.cpu_only
def test_back_to_back_calls(session_seed):
    for seed in rounds(session_seed):
        num_ranks = 2 + seed % 5
        num_blocks = 1 + seed % 3
        arguments = (num_ranks, num_blocks, seed, 5_000)
        ranks.run_processes(num_ranks, test_back_to_back.run_sequence_in_process, *arguments, timeout=300)


@for_seconds
def test_kills_at_any_time(session_seed):
    on_device.needs(4)
    slowest = 0.0
    for seed in rounds(session_seed):
        draw = random.Random(seed)
        arguments = ("any time", draw.choice([signal.SIGKILL, signal.SIGSTOP]), draw.choice([0, 16]))
        reports = ranks.run_processes(
            4, test_faults.survive_a_kill, *arguments, timeout=30 + test_faults.START, mortal={VICTIM}
        )
        test_faults.check_reports(reports)
        others = [report for report in reports if report != ranks.DIED]
        slowest = max(slowest, *(report["elapsed"] for report in others))
        print(f"  phases {[report['phase'] for report in others]}, slowest so far {slowest:.3f} s", flush=True)


@pytest.mark.timeout(60 + soak.NUM_ITERATIONS // 100)
def test_iterations(session_seed):
    num_ranks, iterations = min(4, on_device.most_ranks()), soak.NUM_ITERATIONS
    print(f"{iterations} iterations on {num_ranks} ranks, seed {session_seed}", flush=True)
    start = time.monotonic()
    wrong = on_device.run(num_ranks, soak.run, session_seed, iterations, timeout=30 + iterations / 100)
    seconds = time.monotonic() - start
    print(f"soak: {iterations} iterations, {num_ranks} ranks ({on_device.NAME}), {seconds:.1f} s, {wrong} wrong values")
    assert wrong == [0] * num_ranks


def test_one_wrong_row_in_a_thousand_iterations_is_found(session_seed):
    """Negative control of the test above: only the owner of that row finds all its columns wrong."""
    wrong = on_device.run(min(2, on_device.most_ranks()), soak.run, session_seed, 1_000, 700)
    assert sum(count > 0 for count in wrong) == 1 and sum(wrong) in {shape["hidden"] for shape in soak.SHAPES}, wrong
