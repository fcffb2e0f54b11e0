"""Runs `python -m moe_a2a` in this process, whose ranks need no interpreter that imports PyTorch again."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from subprocess import CompletedProcess
from typing import IO

from moe_a2a.__main__ import main


def run(*arguments: object) -> CompletedProcess[str]:
    """Its exit code, and what it and its ranks have written."""
    words = [str(argument) for argument in arguments]
    with _collected("stdout", 1) as out, _collected("stderr", 2) as err:
        try:
            code = main(words)
        except SystemExit as end:  # argparse
            code = end.code
        sys.stdout.flush()
        return CompletedProcess(words, code, _content(out), _content(err))


@contextlib.contextmanager
def _collected(name: str, descriptor: int) -> Iterator[IO[str]]:
    """A file that replaces a stream of this process, and the descriptor that its ranks inherit."""
    stream, kept = getattr(sys, name), os.dup(descriptor)
    with tempfile.TemporaryFile("w+") as file:
        setattr(sys, name, file)
        os.dup2(file.fileno(), descriptor)
        try:
            yield file
        finally:
            setattr(sys, name, stream)
            os.dup2(kept, descriptor)
            os.close(kept)


def _content(file: IO[str]) -> str:
    file.seek(0)
    return file.read()
