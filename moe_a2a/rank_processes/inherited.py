"""What a rank's process takes over from the process that starts it; passed as arguments of multiprocessing's processes."""

from __future__ import annotations

import os
from multiprocessing import reduction
from typing import IO, Any

OUTPUTS = (1, 2)  # descriptors


class Surroundings:
    """This process's environment and output as they are now; unpickling makes them the rank's. A fork server still has
    those that it was started with."""

    def __reduce__(self) -> tuple:
        return _take_surroundings, (dict(os.environ), *map(reduction.DupFd, OUTPUTS))


def _take_surroundings(environment: dict[str, str], *outputs: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for output, descriptor in zip(outputs, OUTPUTS, strict=True):
        opened = output.detach()
        if opened != descriptor:  # a spawned process has them already
            os.dup2(opened, descriptor)
            os.close(opened)


class OpenFile:
    """A file that a process inherits open; unpickling yields a path that opens it again."""

    def __init__(self, file: IO[bytes]):
        self._file = file

    def __reduce__(self) -> tuple:
        return _inherited_path, (reduction.DupFd(self._file.fileno()),)


def _inherited_path(descriptor: Any) -> str:
    return f"/proc/self/fd/{descriptor.detach()}"
