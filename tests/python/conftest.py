"""Shared by the Python tests: helper modules on the path, a time limit per test, one seed and one device for all.

MOE_A2A_SEED=n repeats a run; without it every run draws a new seed and prints it.
MOE_A2A_TEST_DEVICE=cuda runs the tests that support a device on GPUs, and no others; see on_device.py.
"""

import os
import random
import sys
from pathlib import Path

import pytest
import torch

# Helpers are imported by their plain names, here and in the rank processes.
sys.path.insert(0, str(Path(__file__).parent))

# The tests' tensors are on the CPU unless the session says otherwise, even if the build has a GPU target.
os.environ["MOE_A2A_DEVICE"] = os.environ.get("MOE_A2A_TEST_DEVICE") or "cpu"
# Ranks share the cores: one PyTorch thread each.
torch.set_num_threads(1)
# gloo must not look up this machine's name: sandboxes often cannot resolve it.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import on_device  # noqa: E402 (by its plain name)

SEED = int(os.environ.get("MOE_A2A_SEED") or random.SystemRandom().randrange(1 << 30))


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):
        os.environ["MOE_A2A_SEED"] = str(SEED)  # the workers of pytest-xdist read it


def pytest_report_header() -> str:
    ranks = f"{on_device.NAME}, {on_device.most_ranks()} ranks at most"
    return f"moe_a2a: {ranks}, seed {SEED} (repeat with MOE_A2A_SEED={SEED})"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not on_device.RANKS_ARE_PROCESSES:
        return
    selected = [item for item in items if item.get_closest_marker("on_device")]
    config.hook.pytest_deselected(items=[item for item in items if item not in selected])
    items[:] = selected
    if on_device.most_ranks() == 0:
        for item in items:
            item.add_marker(pytest.mark.skip(reason="PyTorch finds no GPU"))


@pytest.fixture(scope="session", autouse=True)
def ranks_end_with_the_session():
    yield
    on_device.close()


@pytest.fixture(scope="session")
def session_seed() -> int:
    return SEED


@pytest.fixture
def fresh_memory_is_poisoned():
    """Memory that no kernel writes is NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)
