"""Runs one function as N ranks, as threads of this process or as processes of their own.

    run_threads(4, program, arg)       program(group, arg), group = moe_a2a.thread_group(4)[rank]
    run_processes(4, program, arg)     program(group, arg), group = a gloo group of 4 processes

Both return the results in rank order, raise RankError with every rank's traceback when one fails,
and end within `timeout`. Processes are forked from a server that has imported torch once, so that a
rank costs milliseconds instead of seconds; each is killed by its own pid when the time is over.
Where a test means neither but "ranks", it says on_device.run: threads, or processes that stay up.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

import moe_a2a


class RankError(AssertionError):
    """At least one rank raised, died or did not end; the text has what every rank said."""

    def __init__(self, text: str, all_ended: bool = False):
        super().__init__(text)
        self.all_ended = all_ended  # each rank has returned or raised


def slack(seconds: float) -> float:
    """By how much something may be late: `seconds` on an idle machine, in proportion to the load on a busy one."""
    load, _, _ = os.getloadavg()
    return seconds * max(1.0, load / (os.cpu_count() or 1))


DIED = "died"  # the result of a rank in `mortal` that was killed
GRACE = 5.0  # seconds for the other ranks to end once one has failed


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
    while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
        next(thread for thread in threads if thread.is_alive()).join(0.05)
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

context = multiprocessing.get_context("forkserver")
# sympy: torch.testing.assert_close imports it, which takes half a second in every rank.
context.set_forkserver_preload(["torch.distributed", "sympy"])


def run_processes(
    num_ranks: int,
    program: Callable[..., Any],
    *args: Any,
    timeout: float = 60,
    mortal: frozenset[int] | set[int] = frozenset(),
) -> list[Any]:
    """`program` must be at the top level of its file; arguments and results are pickled.

    Ranks in `mortal` may die; their result is DIED.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks = []
        for rank in range(num_ranks):
            receiver, sender = context.Pipe(duplex=False)
            # By file and name: pytest's import mode gives test modules names a child cannot import.
            address = (program.__code__.co_filename, program.__qualname__)
            process = context.Process(
                target=_child,
                args=(sender, folder, rank, num_ranks, address, pickle.dumps(args), timeout),
                daemon=True,
            )
            process.start()
            sender.close()
            ranks.append((process, receiver))
        try:
            return collect(ranks, program.__name__, timeout, set(mortal), Path(folder))
        finally:
            for process, receiver in ranks:
                if process.is_alive():
                    process.kill()
                process.join()
                receiver.close()


def collect(ranks: list[tuple[Any, Any]], name: str, timeout: float, mortal: set[int], folder: Path) -> list[Any]:
    results: list[Any] = [None] * len(ranks)
    errors: dict[int, str] = {}
    all_ended = True
    open_ranks = {receiver: rank for rank, (_, receiver) in enumerate(ranks)}
    deadline = time.monotonic() + timeout
    while open_ranks and (ready := wait(list(open_ranks), max(0.0, deadline - time.monotonic()))):
        for receiver in ready:
            rank = open_ranks.pop(receiver)
            try:
                kind, value = pickle.loads(receiver.recv_bytes())
            except EOFError:
                ranks[rank][0].join(5)
                kind, value = DIED, f"died with exit code {ranks[rank][0].exitcode}"
            all_ended &= kind != DIED
            if kind == "result":
                results[rank] = value
            elif kind == DIED and rank in mortal:
                results[rank] = DIED
            else:
                errors[rank] = value
                deadline = min(deadline, time.monotonic() + GRACE)
    for rank in open_ranks.values():
        errors[rank] = f"still running:\n{_stack_of(ranks[rank][0], rank, folder)}"
        all_ended = False
    if errors:
        raise RankError(failure_text(name, errors), all_ended)
    return results


def _stack_of(process: Any, rank: int, folder: Path) -> str:
    os.kill(process.pid, signal.SIGUSR1)  # faulthandler writes the file
    time.sleep(0.3)
    return (folder / f"stack-{rank}").read_text() or "(no stack)"


def _child(
    sender: Any,
    folder: str,
    rank: int,
    num_ranks: int,
    address: tuple[str, str],
    args: bytes,
    timeout: float,
) -> None:
    with open(Path(folder) / f"stack-{rank}", "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        take_device(rank)
        try:
            program = load_program(*address)
            store = dist.FileStore(str(Path(folder) / "store"), num_ranks)
            dist.init_process_group(
                "gloo",
                store=store,
                rank=rank,
                world_size=num_ranks,
                timeout=timedelta(seconds=timeout),
            )
            dist.barrier()  # a rank that ends at once must not leave while others still connect
            message = ("result", program(dist.group.WORLD, *pickle.loads(args)))
        except BaseException:
            message = ("error", traceback.format_exc())
        # Plain bytes: multiprocessing's own pickler would move tensors through /dev/shm.
        sender.send_bytes(pickle.dumps(message))
        sender.close()
        sys.stdout.flush()
        sys.stderr.flush()
        # Without gloo's teardown, which waits for ranks that a test has killed.
        os._exit(0)


def take_device(rank: int) -> None:
    """A core, or a GPU of the rank's own: kernels of ranks that share one may wait for each other in its queues."""
    torch.set_num_threads(1)
    if os.environ.get("MOE_A2A_DEVICE") == "cuda":
        torch.cuda.set_device(rank)


def load_program(file: str, name: str) -> Callable[..., Any]:
    return getattr(load_module(file), name)


def load_module(file: str) -> ModuleType:
    """A test module, imported under its file's plain name."""
    module_name = Path(file).stem
    module = sys.modules.get(module_name)
    if module is None or getattr(module, "__file__", None) != file:
        spec = importlib.util.spec_from_file_location(module_name, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    return module
