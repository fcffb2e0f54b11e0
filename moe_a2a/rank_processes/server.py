"""What runs in a rank's process (processes.py): programs that come through its pipe, one after another."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import torch.distributed as dist

from moe_a2a.commands.command_line import escape_output
from moe_a2a.rank_processes.inherited import Surroundings


class RankLostError(Exception):
    """Raised by a program whose process is of no further use; the rank counts as dead."""


_stores: list[dist.Store] = []  # in a process whose programs make their own groups


def this_process_store() -> dist.Store:
    """The store that the ranks of a RankProcesses without a backend share."""
    return _stores[0]


def serve(
    surroundings: Surroundings,
    connection: Connection,
    stack_path: str,
    meeting: str,
    rank: int,
    num_ranks: int,
    backend: str | None,
    timeout: float,
    prepare: Callable[[int], None] | None,
) -> None:
    """Answers programs until the caller ends this process, or is gone. The arguments are those of RankProcesses as they arrive here."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    _leave_with_parent()
    escape_output()
    # Otherwise gloo looks up the machine's name, which containers and laptops may not resolve.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with open(stack_path, "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        try:
            if prepare is not None:
                prepare(rank)
            store = dist.FileStore(meeting, num_ranks)
            if backend is None:
                _stores.append(store)
            else:
                limit = timedelta(seconds=timeout)
                dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=limit)
            while True:
                _answer(connection, connection.recv_bytes())
        except EOFError:
            _leave()
        except BaseException:
            _send(connection, "died", _failure())
            os._exit(1)


def _answer(connection: Connection, message: bytes) -> None:
    try:
        program, arguments = pickle.loads(message)
        result = program(lambda what: _send(connection, "progress", what), *arguments)
        if sys.stdout is not None:  # the process may be killed once the result is sent
            sys.stdout.flush()
        _send(connection, "result", result)
    except RankLostError:
        raise
    except BaseException:  # including SystemExit, raised by a test's skip
        _send(connection, "failed", _failure())


def _failure() -> tuple[str, str]:
    error = sys.exc_info()[1]
    try:
        text = str(error)
    except Exception:  # an exception class of the user's may do anything
        text = "(no text: its __str__ raised)"
    return f"raised {type(error).__name__}: {text}", traceback.format_exc()


def _send(connection: Connection, kind: str, content: Any) -> None:
    # Plain bytes: multiprocessing's own pickler would move tensors through /dev/shm.
    message = pickle.dumps((kind, content))
    try:
        connection.send_bytes(message)
    except (BrokenPipeError, ConnectionResetError):
        _leave()


def _leave_with_parent() -> None:
    """A killed parent cannot stop its children, so each watches for the parent's end.

    The kernel resumes a stopped rank when the process that started it ends. That may be the fork server, which ends once nobody
    holds its descriptor: no rank may keep it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    server_alive = getattr(forkserver._forkserver, "_forkserver_alive_fd", None)
    if server_alive is not None:
        os.close(server_alive)

    def watch() -> None:
        wait([parent.sentinel])
        _leave()

    threading.Thread(target=watch, daemon=True).start()


def _leave() -> NoReturn:
    """The caller is gone: it ends its ranks before it closes their pipes. If this process leads a process group, what it has started
    ends too. Gloo's teardown is skipped, since it waits for ranks that are gone."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
