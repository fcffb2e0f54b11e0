"""Stops ranks' processes at random instants, like an unlucky scheduler that stops one rank while the others go on."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections.abc import Iterator

LONGEST_FREEZE, LONGEST_RUN = 0.004, 0.002  # seconds


@contextlib.contextmanager
def frozen_now_and_then(pids: list[int], source: random.Random) -> Iterator[None]:
    """Stops one process at a time, never for longer than LONGEST_FREEZE; all of them run at the end."""
    # By file descriptor: if the process ends, its pid may be reused.
    descriptors = [os.pidfd_open(pid) for pid in pids]
    done = threading.Event()

    def freeze() -> None:
        while not done.wait(source.random() * LONGEST_RUN):
            chosen = source.choice(descriptors)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(chosen, signal.SIGSTOP)
                done.wait(source.random() * LONGEST_FREEZE)
                signal.pidfd_send_signal(chosen, signal.SIGCONT)

    thread = threading.Thread(target=freeze, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        for descriptor in descriptors:
            os.close(descriptor)
