"""Shared by the Python tests: helper modules on the path, a time limit for each, one seed for all.

MOE_A2A_SEED=n repeats a run; without it every run draws new numbers and prints its seed.
"""

import os
import random
import sys
from pathlib import Path

import pytest
import torch

# Helpers are imported by their plain names, here and in the rank processes.
sys.path.insert(0, str(Path(__file__).parent))

# The tests' tensors are on the CPU, also on a machine whose build has a GPU target.
os.environ.setdefault("MOE_A2A_DEVICE", "cpu")
# Ranks share the cores: one thread of PyTorch each.
torch.set_num_threads(1)
# gloo must not look up this machine's name: sandboxes often cannot resolve it.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

SEED = int(os.environ.get("MOE_A2A_SEED") or random.SystemRandom().randrange(1 << 30))


def pytest_report_header() -> str:
    return f"moe_a2a: seed {SEED} (repeat with MOE_A2A_SEED={SEED})"


@pytest.fixture(scope="session")
def session_seed() -> int:
    return SEED
