"""The device of a test session: MOE_A2A_TEST_DEVICE=cuda runs the tests on GPU tensors; by default they run on the CPU.

    pytestmark = on_device.TESTS               in a file whose tests run on either
    on_device.run(3, program, arg)             program(group, arg) on three ranks
    on_device.settle(ep)                       raises what the previous call has found
    on_device.capture(step)                    a CUDA graph of step()

On the CPU ranks are threads. On GPUs each is a process with its own GPU, which stays up from test to test
(ranks.RankPool). MOE_A2A_TEST_POOL=4 does the same on the CPU, with at most four ranks; on fewer GPUs than that, ranks
share them. Such sessions run only these files.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ranks
import torch

import moe_a2a

NAME = os.environ.get("MOE_A2A_TEST_DEVICE") or "cpu"
IS_GPU = NAME != "cpu"
POOL_SIZE = int(os.environ.get("MOE_A2A_TEST_POOL") or 0)
RANKS_ARE_PROCESSES = IS_GPU or POOL_SIZE > 0
MANY = 8  # ranks in a session without GPUs
if IS_GPU and POOL_SIZE:
    os.environ["MOE_A2A_SHARE_GPUS"] = "1"

TESTS = pytest.mark.on_device
cpu_only = pytest.mark.skipif(IS_GPU, reason="about the CPU target")
gpu_only = pytest.mark.skipif(not IS_GPU, reason="needs a GPU: MOE_A2A_TEST_DEVICE=cuda")

_pool: ranks.RankPool | None = None


def most_ranks() -> int:
    if IS_GPU:
        num_gpus = torch.cuda.device_count()
        return POOL_SIZE if num_gpus and POOL_SIZE else num_gpus
    return POOL_SIZE or MANY


def gpus_are_shared() -> bool:
    return IS_GPU and POOL_SIZE > torch.cuda.device_count()


def needs(num_ranks: int) -> None:
    if num_ranks > most_ranks():
        pytest.skip(f"needs {num_ranks} {'GPUs' if IS_GPU else 'ranks'}, there are {most_ranks()}")


def needs_own_gpus(num_ranks: int) -> None:
    needs(num_ranks)
    if gpus_are_shared():
        pytest.skip("the ranks share GPUs, which NCCL refuses")


def run(num_ranks: int, program: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
    """Runs program(group, *args) on each rank; returns the results in rank order. See ranks.py."""
    global _pool
    needs(num_ranks)
    if not RANKS_ARE_PROCESSES:
        return ranks.run_threads(num_ranks, program, *args, timeout=timeout)
    if _pool is None or _pool.is_closed:
        _pool = ranks.RankPool(most_ranks())
    return _pool.run(num_ranks, program, *args, timeout=timeout)


def close() -> None:
    global _pool
    if _pool is not None:
        _pool.close()
    _pool = None


# On a GPU a call returns before its kernels have run; the next call that synchronises raises what they find.


def settle(ep: Any) -> None:
    if ep.device.type != "cpu":
        ep.check()


def dispatch(ep: Any, *args: Any, **options: Any) -> Any:
    """ep.dispatch, which leaves no error to be raised later."""
    handle = ep.dispatch(*args, **options)
    settle(ep)
    return handle


def combine(ep: Any, *args: Any, **options: Any) -> torch.Tensor:
    combined = ep.combine(*args, **options)
    settle(ep)
    return combined


def refusals(group: Any, fails: bool) -> Callable[..., contextlib.AbstractContextManager[None]]:
    """refused(error, text): around a call that fails on this rank or, if not `fails`, on another. Then all meet: had that rank tried
    again at once, its rows might have come before its refusal was seen, and the text might be that of the next refusal."""

    @contextlib.contextmanager
    def refused(error: Any, text: str) -> Iterator[None]:
        with pytest.raises(error if fails else moe_a2a.PeerRefusedError, match=text):
            yield
        group.all_gather(None)

    return refused


def capture(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of step(), and the result that each replay fills; warmed up on a side stream, as PyTorch requires."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result
