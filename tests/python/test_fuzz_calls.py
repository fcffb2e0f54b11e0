"""Random calls on two and three ranks; see fuzz_calls.py.

A few hundred steps by default. MOE_A2A_FUZZ_STEPS=7000 makes it a soak (a step is about one call of each rank), and
MOE_A2A_FUZZ_SEED repeats a run; MOE_A2A_TEST_DEVICE=cuda runs it on GPUs.
"""

import os

import fuzz_calls
import on_device
import pytest

pytestmark = on_device.TESTS

NUM_STEPS = int(os.environ.get("MOE_A2A_FUZZ_STEPS") or 150)
STEPS_OF_AN_OBJECT = 150


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_random_calls(num_ranks):
    first = int(os.environ.get("MOE_A2A_FUZZ_SEED") or int.from_bytes(os.urandom(3), "little"))
    for i in range((NUM_STEPS + STEPS_OF_AN_OBJECT - 1) // STEPS_OF_AN_OBJECT):
        seed = first + i
        print(f"MOE_A2A_FUZZ_SEED={seed}")
        on_device.run(num_ranks, fuzz_calls.fuzz, seed, STEPS_OF_AN_OBJECT, timeout=300)
