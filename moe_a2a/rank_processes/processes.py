"""RankProcesses, as the caller sees them, and the start of its processes."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import IO, Any

import torch

from moe_a2a import devices
from moe_a2a.rank_processes.inherited import OpenFile, Surroundings
from moe_a2a.rank_processes.server import serve

DIED = "died"  # the result of a rank that was allowed to die
POSTPONED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SECONDS_TO_DIE = 5.0
FORK_SERVER = "moe_a2a.rank_processes.fork_server"  # for preload(), where importing all of moe_a2a is allowed
LONGEST_SOCKET_PATH = 107  # bytes; unix(7), "Pathname sockets"
SECONDS_TO_DUMP = 0.3
SECONDS_BETWEEN_LOOKS = 0.5  # for dead ranks


class RankError(RuntimeError):
    """A rank raised, died, or did not finish in time.

    Attributes:
        details: for each rank that failed, its traceback, its exit code, or its current stack.
        all_ended: whether each rank has returned or raised, and can run another program.
        kind: how the first rank failed: "raised", "died", or "timeout" if none failed and one did not finish.
    """

    def __init__(self, message: str, details: str, all_ended: bool, kind: str):
        super().__init__(message)
        self.details = details
        self.kind = kind
        self.all_ended = all_ended


@dataclass
class _Failure:
    summary: str
    text: str
    kind: str


@dataclass
class _Rank:
    process: Any
    connection: Connection
    stack: IO[bytes]  # receives its stack on SIGUSR1


_preloaded: list[str] = []


def preload(*modules: str) -> None:
    """Modules that the fork server imports when this process starts its first rank; a rank that needs them then starts in
    milliseconds. By name: this process may not need them itself."""
    _preloaded.extend(name for name in modules if name not in _preloaded)
    multiprocessing.get_context("forkserver").set_forkserver_preload(_preloaded)


def _fork_server_can_listen() -> bool:
    multiprocessing_name = os.path.join("pymp-12345678", "listener-12345678")
    return len(os.fsencode(os.path.join(tempfile.gettempdir(), multiprocessing_name))) <= LONGEST_SOCKET_PATH


@functools.cache
def _await_fork_server() -> None:
    """Returns once the server has imported everything. That takes seconds, in which signals must neither be postponed, as they
    are while a rank starts, nor interrupt a half-started process: a thread starts one, and signals interrupt the wait for it."""
    probe = multiprocessing.get_context("forkserver").Process(target=int)

    def start() -> None:
        with contextlib.suppress(OSError, EOFError):  # starting the ranks fails in the same way, and reports it
            probe.start()

    starter = threading.Thread(target=start, daemon=True)
    with _signals_postponed():  # ranks inherit the server's mask, the starter this thread's
        forkserver.ensure_running()
        starter.start()
    starter.join()
    if probe.pid is not None:
        probe.join()


class RankProcesses:
    """`num_ranks` processes of one torch.distributed process group, which run one program after another.

    method: the start method of multiprocessing: "spawn", or "forkserver", which becomes "spawn" if the temporary folder's path
    is too long for the server's socket. backend: of torch.distributed; None: programs make their own
    groups, on server.this_process_store(). timeout: of the group, seconds.
    prepare: called with the rank in each process before the group is made.
    dumps: pickles programs and their arguments for processes that import modules by name.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        timeout: float,
        method: str = "spawn",
        backend: str | None = "gloo",
        prepare: Callable[[int], None] | None = None,
        dumps: Callable[[Any], bytes] = pickle.dumps,
    ):
        self._dumps = dumps
        self._ranks: list[_Rank] = []
        # The ranks inherit it open, so it needs no name, and nothing remains whichever process is killed.
        self._meeting = tempfile.TemporaryFile()
        if method == "forkserver" and not _fork_server_can_listen():
            method = "spawn"
        context = multiprocessing.get_context(method)
        try:
            if method == "forkserver":
                _await_fork_server()
            for rank in range(num_ranks):
                self._start(context, rank, num_ranks, backend, timeout, prepare)
        except BaseException:
            self.close()
            raise

    def _start(
        self, context: Any, rank: int, num_ranks: int, backend: str | None, timeout: float, prepare: Any
    ) -> None:
        ours, theirs = context.Pipe()
        stack = tempfile.TemporaryFile()
        process = context.Process(
            target=serve,
            args=(
                Surroundings(),
                theirs,
                OpenFile(stack),
                OpenFile(self._meeting),
                rank,
                num_ranks,
                backend,
                timeout,
                prepare,
            ),
            daemon=True,
        )
        with _signals_postponed():  # a half-started rank could not be ended
            try:
                process.start()
            except (EOFError, ConnectionError):
                if context.get_start_method() != "forkserver":
                    raise
                cause = (
                    f"its fork server ended, most likely while it imported {', '.join(_preloaded) or 'the main module'}"
                )
                details = "the server's own error is on stderr"
                raise RankError(f"rank {rank} did not start: {cause}", details, False, "died") from None
            self._ranks.append(_Rank(process, ours, stack))
        theirs.close()  # so that a rank's death closes the pipe

    def run(
        self,
        program: Callable[..., Any],
        *arguments: Any,
        timeout: float,
        own: Sequence[tuple] | None = None,
        num_ranks: int | None = None,
        mortal: Set[int] = frozenset(),
        grace: float = 0.0,
        on_progress: Callable[[str], None] = lambda what: None,
    ) -> list[Any]:
        """Runs program(report, *arguments, *own[rank]) on the first `num_ranks` ranks (default: all); returns their results.

        When a rank calls report(what), on_progress(what) is called here. Ranks in `mortal` may die; their result is DIED.
        Once a rank has failed, the others have `grace` seconds to end. A RankError that leaves a rank running or dead
        closes the object.
        """
        ranks = self._ranks[:num_ranks]
        if own is None:
            messages = [self._dumps((program, arguments))] * len(ranks)
        else:
            messages = [self._dumps((program, (*arguments, *of_rank))) for of_rank in own]
        try:
            for rank, message in zip(ranks, messages, strict=True):
                with contextlib.suppress(OSError):  # it has died: the read below reports it
                    rank.connection.send_bytes(message)
            return self._collect(ranks, timeout, mortal, grace, on_progress)
        except BaseException as error:
            if not (isinstance(error, RankError) and error.all_ended):
                self.close()
            raise

    def _collect(
        self, ranks: list[_Rank], timeout: float, mortal: Set[int], grace: float, on_progress: Callable[[str], None]
    ) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, _Failure] = {}
        running: dict[Any, int] = {rank.connection: number for number, rank in enumerate(ranks)}
        all_ended = True
        deadline = time.monotonic() + timeout
        while running:
            left = max(0.0, deadline - time.monotonic())
            ready = wait(list(running), min(left, SECONDS_BETWEEN_LOOKS))
            if not ready:  # a dead rank's pipe stays open in processes that it has forked
                ready = [one for one, number in running.items() if not ranks[number].process.is_alive()]
            if not ready and left == 0:
                break
            for connection in ready:
                number = running[connection]
                kind, content = _next_message(ranks[number])
                if kind == "progress":
                    on_progress(content)
                    continue
                del running[connection]
                all_ended &= kind in ("result", "failed")
                if kind == "result":
                    results[number] = content
                elif kind == "died" and number in mortal:
                    results[number] = DIED
                else:
                    summary, text = content
                    failures[number] = _Failure(
                        f"rank {number} {summary}", text, "died" if kind == "died" else "raised"
                    )
                    deadline = min(deadline, time.monotonic() + grace)
        if running or failures:
            still_running = {number: ranks[number] for number in running.values()}
            raise _error_of(failures, still_running, all_ended and not running)
        return [results[number] for number in range(len(ranks))]

    @property
    def is_closed(self) -> bool:
        return not self._ranks

    def rotate(self) -> None:
        """Assigns each rank to the next process; for programs that make their own groups."""
        self._ranks = [*self._ranks[1:], *self._ranks[:1]]

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    def close(self) -> None:
        for rank in self._ranks:
            rank.process.kill()  # no effect if it has ended
        for rank in self._ranks:
            rank.process.join()
            rank.connection.close()
            rank.stack.close()
        self._ranks = []
        self._meeting.close()

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def run_on_ranks(
    num_ranks: int,
    rank_main: Callable[..., Any],
    *arguments: Any,
    timeout: float,
    on_progress: Callable[[str], None] = lambda what: None,
    backend: str = "gloo",
    device_type: str | None = None,
) -> list[Any]:
    """Runs rank_main(report, *arguments) once, in num_ranks processes; see RankProcesses. device_type: None: that of
    devices.default_device(). Raises BrokenPipeError if a rank did: nobody reads the command's output any more."""
    preload(FORK_SERVER, rank_main.__module__)
    method = start_method(device_type or devices.default_device_type())
    prepare = CoresShared(num_ranks)
    with RankProcesses(num_ranks, timeout=timeout, method=method, backend=backend, prepare=prepare) as ranks:
        try:
            return ranks.run(rank_main, *arguments, timeout=timeout, on_progress=on_progress)
        except RankError as error:
            if "raised BrokenPipeError" in str(error):
                raise BrokenPipeError from error
            raise


def start_method(device_type: str) -> str:
    """Start method of ranks on such devices. A fork server that has imported everything may have asked CUDA for its devices,
    and a fork cannot use CUDA after that."""
    return "spawn" if device_type == "cuda" else "forkserver"


@dataclass
class CoresShared:
    """Divides the cores among the ranks."""

    num_ranks: int

    def __call__(self, rank: int) -> None:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // self.num_ranks))


def _next_message(rank: _Rank) -> tuple[str, Any]:
    """The message of a rank that has sent one, or has died."""
    try:
        if not rank.connection.poll():
            raise EOFError
        message = rank.connection.recv_bytes()
    except (EOFError, OSError):
        rank.process.join(SECONDS_TO_DIE)
        text = f"died with exit code {rank.process.exitcode}"
        if rank.process.exitcode == -signal.SIGKILL:
            text += " (SIGKILL: the kernel sends it when memory runs out)"
        return "died", (text, text)
    try:
        return pickle.loads(message)
    except Exception as error:
        text = f"returned a result that cannot be unpickled: {type(error).__name__}: {error}"
        return "failed", (text, traceback.format_exc())


def _error_of(failures: dict[int, _Failure], still_running: dict[int, _Rank], all_ended: bool) -> RankError:
    if failures:
        # Later failures may be consequences of the first. A death is not, but what others raise may be a consequence of it.
        first = min(failures.values(), key=lambda failure: failure.kind != "died")
        message, kind = first.summary, first.kind
    else:
        message, kind = f"ranks {sorted(still_running)} did not finish in time", "timeout"
    texts = {number: failure.text for number, failure in failures.items()}
    texts |= {number: f"still running:\n{_stack_of(rank)}" for number, rank in still_running.items()}
    details = "\n".join(f"--- rank {number} ---\n{text}" for number, text in sorted(texts.items()))
    return RankError(message, details, all_ended, kind)


def _stack_of(rank: _Rank) -> str:
    with contextlib.suppress(ProcessLookupError):
        os.kill(rank.process.pid, signal.SIGUSR1)  # faulthandler writes the file
    time.sleep(SECONDS_TO_DUMP)
    rank.stack.seek(0)
    return rank.stack.read().decode(errors="replace") or "(no stack)"


@contextlib.contextmanager
def _signals_postponed() -> Iterator[None]:
    """Delays these signals until the end. A process started inside has them blocked, and a rank keeps SIGINT and SIGHUP blocked:
    a terminal sends them to all processes, but the caller handles them and ends the ranks."""
    resource_tracker.ensure_running()  # starting it with the first process would unblock the signals again
    came: list[int] = []
    handlers = {}
    if threading.current_thread() is threading.main_thread():  # handlers run there, whichever thread gets the signal
        for number in POSTPONED:
            handlers[number] = signal.signal(number, lambda number, frame: came.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, POSTPONED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for postponed in came:
            signal.raise_signal(postponed)
