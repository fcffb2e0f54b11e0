"""What calls of the torch.distributed backend return, and where they run: in a thread for CPU tensors, on a stream for GPU
tensors. In both cases the caller continues and calls keep their order."""

from __future__ import annotations

import atexit
import collections
import os
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from moe_a2a.untraced import untraced

_TorchWork: Any = dist.Work  # its stubs are incomplete
_c10d: Any = torch._C._distributed_c10d
EXIT_SECONDS = 5.0  # how long an exiting process waits for its queued calls


class Work(_TorchWork):
    """A call that writes `results`; DistributedDataParallel gets them from a future. This class: the call has returned; on a
    GPU its kernels are queued on the current stream."""

    def __init__(self, results: list[torch.Tensor]):
        super().__init__()
        self._results = results

    @untraced
    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    @untraced
    def synchronize(self) -> None:
        self.wait()

    @untraced
    def get_future(self) -> Any:
        """On a GPU, waiting for the future makes the waiter's stream wait for the work queued on the current stream so far."""
        gpus = list({x.device for x in self._results if x.is_cuda})
        future: Any = torch.futures.Future(devices=gpus) if gpus else torch.futures.Future()  # type: ignore[arg-type]
        future.set_result(self._results)
        return future

    @untraced
    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return self.is_completed()

    def exception(self) -> BaseException | None:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._results


class StreamWork(Work):
    """Work on its own stream: wait() makes the then-current stream wait for it, not the host."""

    def __init__(self, results: list[torch.Tensor], stream: Any, ended: Any):
        super().__init__(results)
        self._stream, self._ended = stream, ended

    @untraced
    def wait(self, timeout: timedelta | None = None) -> bool:
        torch.cuda.current_stream(self._stream.device).wait_event(self._ended)
        return True

    @untraced
    def get_future(self) -> Any:
        with torch.cuda.stream(self._stream):
            return super().get_future()

    @untraced
    def is_completed(self) -> bool:
        return self._ended.query()

    @classmethod
    def begin(
        cls, stream: Any, call: Callable[[], Any], tensors: list[torch.Tensor], results: list[torch.Tensor]
    ) -> StreamWork:
        """A call that raises may have queued kernels: they too keep the tensors' memory, and the current stream waits for them."""
        current = torch.cuda.current_stream(stream.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            try:
                call()
            except BaseException:
                current.wait_stream(stream)
                raise
            finally:
                for x in tensors:
                    x.record_stream(stream)
            ended = stream.record_event()
        return cls(results, stream, ended)


class ThreadWork(Work):
    """Work in a CallThread: wait() blocks, and raises the call's error."""

    def __init__(self, results: list[torch.Tensor]):
        super().__init__(results)
        self._lock = threading.Lock()
        self._has_run = False
        self._over = threading.Event()  # has run, and so has its future, if any
        self._error: BaseException | None = None
        self._begun: Any = None  # made with the future; completing it runs _outcome()
        self._future: Any = None

    def run(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except BaseException as error:
            self._error = error

    def end(self) -> bool:
        """After run(). Whether it has a future, which complete_future() has to complete."""
        with self._lock:
            self._has_run = True
            if self._future is None:
                self._over.set()
            return self._future is not None

    def complete_future(self) -> None:
        """Also runs what was added to the future by then(), which may make calls and wait for them."""
        self._begun.set_result(None)

    @untraced
    def get_future(self) -> Any:
        with self._lock:
            if self._future is None:
                self._begun = torch.futures.Future()
                self._future = self._begun.then(self._outcome)
                self._future.add_done_callback(lambda _: self._over.set())  # the first, so before the user's callbacks
                if self._has_run:
                    self.complete_future()
            return self._future

    def _outcome(self, _: Any) -> list[torch.Tensor]:
        if self._error is not None:  # raised in here, it is the future's error for C++ too
            raise self._error
        return self._results

    @untraced
    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = timeout.total_seconds() if timeout else 0
        if not self._over.wait(seconds if seconds > 0 else None):
            raise RuntimeError(f"the collective has not ended after {seconds} s; wait longer, or without a timeout")
        if self._error is not None:
            raise self._error
        return True

    @untraced
    def is_completed(self) -> bool:
        return self._over.is_set()

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error


class BarrierWork(Work):
    """The barrier of a GPU: wait() blocks the host until `work`, and all that the current stream has queued, is over."""

    def __init__(self, work: Work, device: torch.device):
        super().__init__([])
        self._work, self._device = work, device

    @untraced
    def wait(self, timeout: timedelta | None = None) -> bool:
        self._work.wait(timeout)
        torch.cuda.current_stream(self._device).synchronize()
        return True

    @untraced
    def is_completed(self) -> bool:
        return self._work.is_completed()


class JointWork(Work):
    """Several works of a delegate as one."""

    def __init__(self, results: list[torch.Tensor], works: list[Any]):
        super().__init__(results)
        self._works = works

    @untraced
    def wait(self, timeout: timedelta | None = None) -> bool:
        given = () if timeout is None else (timeout,)
        return all([work.wait(*given) for work in self._works])

    @untraced
    def get_future(self) -> Any:
        return torch.futures.collect_all([work.get_future() for work in self._works]).then(lambda _: self._results)

    @untraced
    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


class RecentWorks:
    """Keeps the latest works on small tensors alive: DDP's join() drops its one-element work and lets C++ wait for it, which needs
    the Python object."""

    LARGEST, COUNT = 64, 16

    def __init__(self) -> None:
        self._works: collections.deque[Work] = collections.deque(maxlen=self.COUNT)

    def keep(self, work: Work) -> Work:
        if sum(x.untyped_storage().nbytes() for x in work.result()) <= self.LARGEST:
            self._works.append(work)
        return work


class CallThread:
    """Runs calls in order. If the caller waits at once and no other call runs or is queued, the call runs in the caller's thread:
    a thread switch takes as long as a small collective. So do calls in a forked child, which has no such thread.

    One call runs at a time. Its future is completed afterwards: callbacks of the future may make calls and wait for them,
    and meanwhile another thread runs these."""

    def __init__(self, name: str):
        self._name, self._pid = name, os.getpid()
        self._calls: collections.deque[tuple[ThreadWork, Callable[[], Any]]] = collections.deque()
        self._last: Callable[[], ThreadWork | None] = lambda: None  # a weak reference: its tensors may go
        self._threads: list[threading.Thread] = []
        self._runner: int | None = None  # the thread, of ours or of a caller, that runs a call: outside the lock
        self._is_closed = False
        self._num_waiting = 0  # threads of ours that wait for a call
        self._changed = threading.Condition()  # guards the above
        _open.add(self)

    def run(self, call: Callable[[], Any], results: list[torch.Tensor], waits_at_once: bool) -> Work:
        if os.getpid() != self._pid:  # and the lock may be one that nobody here holds
            call()
            return Work(results)
        in_inference_mode = torch.is_inference_mode_enabled()

        def call_as_here() -> None:
            """In the caller's mode: only in inference mode may a call write to tensors made in it."""
            with torch.inference_mode(in_inference_mode):
                call()

        own = threading.get_ident()
        if waits_at_once and self._runner == own:  # within a call, from a signal handler or a finaliser
            call()
            return Work(results)
        with self._changed:
            if not waits_at_once or self._runner is not None or self._is_any_queued():
                work = ThreadWork(results)
                self._last = weakref.ref(work)
                self._calls.append((work, call_as_here))
                self._find_a_thread()
                return work
            self._runner = own
        try:
            call()
        finally:
            with self._changed:
                self._runner = None
                self._find_a_thread()
        return Work(results)

    def close(self, seconds: float | None = None) -> None:
        """Waits for the call that a caller's thread runs, for queued calls and the callbacks of their futures. With `seconds`,
        gives up after that time and drops the calls that have not begun."""
        if os.getpid() != self._pid:
            return
        deadline = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._runner in (None, threading.get_ident()), seconds)
        own = threading.current_thread()  # if a callback closes; it is joined at exit
        while others := [thread for thread in self._threads if thread is not own]:  # one may still start another
            others[0].join(None if deadline is None else max(deadline - time.monotonic(), 0))
            self._threads.remove(others[0])
        if deadline is not None:
            self._calls.clear()

    def _is_any_queued(self) -> bool:
        """Or not over yet."""
        last = self._last()
        return last is not None and not last.is_completed()

    def _find_a_thread(self) -> None:
        """Wakes or starts a thread for the next call, unless one runs."""
        if self._is_closed:
            self._changed.notify_all()  # one notification could wake a thread in close() instead of one of ours
        if self._runner is not None or not self._calls:
            return
        if self._num_waiting > 0:
            self._changed.notify()
        else:
            self._threads.append(threading.Thread(target=self._serve, name=self._name, daemon=True))
            self._threads[-1].start()

    def _serve(self) -> None:
        while self._serve_one():
            pass

    def _serve_one(self) -> bool:
        """In a frame of its own: a thread that waits keeps no tensors."""
        next_call = self._wait_for_call()
        if next_call is None:
            return False
        work, call = next_call
        work.run(call)
        with self._changed:
            self._runner = None
            has_future = work.end()
            if has_future:
                self._find_a_thread()
        if has_future:
            work.complete_future()
        return True

    def _wait_for_call(self) -> tuple[ThreadWork, Callable[[], Any]] | None:
        """None at the end."""
        with self._changed:
            self._num_waiting += 1
            self._changed.wait_for(lambda: (self._calls or self._is_closed) and self._runner is None)
            self._num_waiting -= 1
            if not self._calls:
                self._changed.notify_all()
                return None
            self._runner = threading.get_ident()
            return self._calls.popleft()


_open: weakref.WeakSet[CallThread] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Ends the threads of groups that were not destroyed: one that needs the GIL while the interpreter ends aborts the process."""
    deadline = time.monotonic() + EXIT_SECONDS
    for thread in list(_open):
        thread.close(max(deadline - time.monotonic(), 0))
