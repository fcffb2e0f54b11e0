"""Ranks as processes of this machine; they never outlive the caller."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import reduction, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import IO, Any

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
    processes, connections = [], []
    with tempfile.TemporaryFile() as meeting:
        try:
            for rank in range(num_ranks):
                ours, theirs = spawn.Pipe()
                process = spawn.Process(
                    target=_process_main,
                    args=(rank, num_ranks, backend, _OpenFile(meeting), theirs, timeout, rank_main, arguments),
                    daemon=True,
                )
                with _signals_postponed():  # a rank that is half started could not be ended
                    process.start()
                    processes.append(process)
                theirs.close()  # so that a rank's death closes the pipe
                connections.append(ours)
            return _collect(connections, time.monotonic() + timeout, on_progress)
        finally:
            for process in processes:
                process.kill()  # no effect on one that has ended
            for process in processes:
                process.join()


class _OpenFile:
    """A file that a process inherits open. It needs no name, so nothing is left of it, whoever is killed when."""

    def __init__(self, file: IO[bytes]):
        self._file = file

    def __reduce__(self) -> tuple:
        return _inherited_path, (reduction.DupFd(self._file.fileno()),)


def _inherited_path(descriptor: Any) -> str:
    return f"/proc/self/fd/{descriptor.detach()}"


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


@contextlib.contextmanager
def _signals_postponed() -> Iterator[None]:
    """SIGINT and SIGTERM take effect at the end. A process that is started inside has them blocked, and a rank keeps
    SIGINT blocked: a terminal sends Ctrl-C to all processes, but it is the caller that handles it and ends the ranks."""
    resource_tracker.ensure_running()  # starting it with the first process would lift the mask again
    came: list[int] = []
    handlers = {}
    if threading.current_thread() is threading.main_thread():  # where handlers run, whichever thread has the signal
        for number in (signal.SIGINT, signal.SIGTERM):
            handlers[number] = signal.signal(number, lambda number, frame: came.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)


def _process_main(rank, num_ranks, backend, meeting, connection, timeout, rank_main, arguments) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    _leave_with_parent()
    # Gloo otherwise looks the machine's name up, which containers and laptops may not know.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))
    try:
        dist.init_process_group(
            backend,
            store=dist.FileStore(meeting, num_ranks),
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
