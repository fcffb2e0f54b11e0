"""Ranks as processes of this machine; they never outlive the caller."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist


class RankError(RuntimeError):
    """A rank raised, died, or did not finish in time; all others have been stopped."""

    def __init__(self, message: str, traceback: str = ""):
        super().__init__(message)
        self.traceback = traceback  # of the rank


def run_on_ranks(
    num_ranks: int,
    rank_main: Callable[..., Any],
    *arguments: Any,
    timeout: float,
    on_progress: Callable[[str], None] = lambda what: None,
    backend: str = "gloo",
) -> list[Any]:
    """`rank_main(report, *arguments)` in num_ranks processes of one process group; their results.

    `backend` is that of torch.distributed. A rank calls report(what) to have on_progress(what) called here. Arguments and
    results must be picklable, without tensors: numpy arrays travel by value.
    """
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="moe_a2a_") as folder:
        store = f"{folder}/store"
        processes, connections = [], []
        try:
            for rank in range(num_ranks):
                ours, theirs = spawn.Pipe()
                process = spawn.Process(
                    target=_process_main,
                    args=(rank, num_ranks, backend, store, theirs, timeout, rank_main, arguments),
                    daemon=True,
                )
                process.start()
                theirs.close()  # so that a rank's death closes the pipe
                processes.append(process)
                connections.append(ours)
            return _collect(connections, time.monotonic() + timeout, on_progress)
        finally:
            for process in processes:
                process.kill()  # no effect on one that has ended
            for process in processes:
                process.join()


def _collect(connections: list[Connection], deadline: float, on_progress: Callable[[str], None]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(connections):
        waiting = {c: r for r, c in enumerate(connections) if r not in results}
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"ranks {sorted(waiting.values())} did not finish in time")
        for connection in ready:
            rank = waiting[connection]
            try:
                kind, content = connection.recv()
            except EOFError:
                raise RankError(f"rank {rank} died") from None
            if kind == "failed":
                message, text = content
                raise RankError(f"rank {rank} raised {message}", text)
            if kind == "progress":
                on_progress(content)
            else:
                results[rank] = content
    return [results[rank] for rank in range(len(connections))]


def _process_main(rank, num_ranks, backend, store, connection, timeout, rank_main, arguments) -> None:
    _leave_with_parent()
    # Gloo otherwise looks the machine's name up, which containers and laptops may not know.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))
    try:
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout),
        )
        result = rank_main(lambda what: connection.send(("progress", what)), *arguments)
        connection.send(("result", result))
        dist.destroy_process_group()
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        connection.send(("failed", (message, traceback.format_exc())))


def _leave_with_parent() -> None:
    """A killed parent cannot stop its children, so each watches for its end."""

    def watch() -> None:
        wait([multiprocessing.parent_process().sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
