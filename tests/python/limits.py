"""Bounds on the time and memory of code under test: a fuzzer must end, and must not exhaust the machine."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager


class TooSlowError(Exception):
    pass


@contextmanager
def limits(seconds: int = 20, nbytes: int = 1 << 30) -> Iterator[None]:
    """Raises TooSlowError after `seconds`, MemoryError if memory grows by more than `nbytes`. Only in the main thread."""

    def too_slow(*_: object) -> None:
        raise TooSlowError(f"still busy after {seconds} s")

    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, too_slow)
    signal.alarm(seconds)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + nbytes, hard))
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
