"""Runs one function as N ranks, as threads of this process or as separate processes.

    run_threads(4, program, arg)       program(group, arg), group = moe_a2a.thread_group(4)[rank]
    run_processes(4, program, arg)     program(group, arg), group = a gloo group of 4 processes
    RankPool(4).run(3, program, arg)   program(group, arg), group = moe_a2a's view of 3 of 4 processes that stay up

All return the results in rank order, raise RankError with every rank's traceback if one fails, and end within
`timeout`. Processes are those of moe_a2a/rank_processes, forked from a server that has imported torch once, so a rank takes
milliseconds to start instead of seconds. A test that does not care which kind uses on_device.run.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Set
from typing import Any

import pickled_programs
import torch
import torch.distributed as dist

import moe_a2a
from moe_a2a import devices, rank_processes
from moe_a2a.rank_processes import DIED, RankProcesses, start_method
from moe_a2a.rank_processes.server import RankLostError

__all__ = ["DIED", "RankError", "RankPool", "receive_interrupts", "run_processes", "run_threads"]

GRACE = 5.0  # seconds that the other ranks have to end once one has failed
START_SECONDS = 60.0


class RankError(AssertionError):
    """At least one rank raised, died or did not end; the text includes every rank's output."""


def slack(seconds: float) -> float:
    """Allowed lateness: `seconds` on an idle machine, scaled by the load on a busy one."""
    load, _, _ = os.getloadavg()
    return seconds * max(1.0, load / (os.cpu_count() or 1))


def failure_text(name: str, errors: dict[int, str]) -> str:
    return f"{name}: {len(errors)} rank(s) failed\n" + "\n".join(
        f"--- rank {rank} ---\n{text}" for rank, text in sorted(errors.items())
    )


# ----------------------------------------------------------------------------------------- threads


def run_threads(num_ranks: int, program: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
    groups = moe_a2a.thread_group(num_ranks)
    results: list[Any] = [None] * num_ranks
    errors: dict[int, str] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = program(groups[rank], *args)
        except BaseException:
            errors[rank] = traceback.format_exc()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    while (running := [thread for thread in threads if thread.is_alive()]) and time.monotonic() < deadline:
        running[0].join(0.05)
        if errors:
            deadline = min(deadline, time.monotonic() + GRACE)
    for rank, thread in enumerate(threads):
        if thread.is_alive():
            stack = sys._current_frames().get(thread.ident or 0)
            where = "".join(traceback.format_stack(stack)) if stack else "?"
            errors.setdefault(rank, f"still running:\n{where}")
    if errors:
        raise RankError(failure_text(program.__name__, errors))
    return results


# --------------------------------------------------------------------------------------- processes

# torch.testing.assert_close imports sympy, which takes half a second in every rank.
rank_processes.preload("torch.distributed", "sympy", "pytest")
if start_method(devices.default_device_type()) == "forkserver":  # a server of ranks on GPUs must not touch CUDA
    modules = ("moe_a2a.leaderboard.rank_program", "moe_a2a.leaderboard.preloaded")
    rank_processes.preload(rank_processes.FORK_SERVER, *modules)


def run_processes(
    num_ranks: int, program: Callable[..., Any], *args: Any, timeout: float = 60, mortal: Set[int] = frozenset()
) -> list[Any]:
    """Ranks in `mortal` may die; their result is DIED."""
    with _start(num_ranks, timeout) as processes:
        return _run(processes, program, _with_world, program, args, timeout=timeout, mortal=mortal)


class RankPool:
    """`num_ranks` processes that stay up; a program runs on the first of them.

    On a GPU a process needs seconds before its first kernel, longer than most tests. One that hangs, dies or loses its
    GPU ends all of them.
    """

    def __init__(self, num_ranks: int):
        self._processes = _start(num_ranks, START_SECONDS)
        _run(self._processes, _make_groups, _make_groups, num_ranks, timeout=START_SECONDS)

    def run(self, num_ranks: int, program: Callable[..., Any], *args: Any, timeout: float) -> list[Any]:
        """Closures are supported."""
        return _run(
            self._processes, program, _with_group, num_ranks, program, args, timeout=timeout, num_ranks=num_ranks
        )

    @property
    def is_closed(self) -> bool:
        return self._processes.is_closed

    def close(self) -> None:
        self._processes.close()


def _start(num_ranks: int, timeout: float) -> RankProcesses:
    return RankProcesses(
        num_ranks, timeout=timeout, method="forkserver", prepare=take_device, dumps=pickled_programs.to_bytes
    )


def _run(processes: RankProcesses, named: Callable[..., Any], *program: Any, **how: Any) -> list[Any]:
    try:
        return processes.run(*program, grace=GRACE, **how)
    except rank_processes.RankError as error:
        raise RankError(f"{named.__name__}: {error}\n{error.details}") from None


# Runs in a rank's process; commands use the first argument, report().

_groups: list[dist.ProcessGroup] = []  # of a pool: with one rank, with two, ...


def take_device(rank: int) -> None:
    """Binds the rank to a core, or to a GPU: its own, unless there are more ranks than GPUs (on_device.py)."""
    torch.set_num_threads(1)
    if os.environ.get("MOE_A2A_DEVICE") == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())


def receive_interrupts() -> None:
    """In a rank: SIGINT raises KeyboardInterrupt. Rank processes block it by default, since the caller ends them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _with_world(report: Any, program: Callable[..., Any], args: tuple) -> Any:
    dist.barrier()  # a rank that dies at once must not do so while others are still connecting
    return program(dist.group.WORLD, *args)


def _make_groups(report: Any, num_ranks: int) -> None:
    _groups.extend(dist.new_group(range(size)) for size in range(1, num_ranks + 1))
    dist.barrier()


def _with_group(report: Any, size: int, program: Callable[..., Any], args: tuple) -> Any:
    try:
        return program(moe_a2a.as_group(_groups[size - 1]), *args)
    except BaseException as error:
        if torch.cuda.is_initialized() and not _has_its_gpu():
            raise RankLostError("its GPU is out of use") from error
        raise


def _has_its_gpu() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:  # a kernel fault persists in its process
        return False
    return True
