"""Files that are replaced once they are complete."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` once it is complete: a reader, or a process that also writes it, sees no part of it.
    Links, such as /dev/stdout, and anything but regular files are written to directly."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        with open(path, "wb") as file:
            yield file
        return
    beside = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_native_id()}")
    try:
        with open(beside, "wb") as file:
            yield file
        beside.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        if isinstance(error, OSError) and error.filename == str(beside):
            error.filename = str(path)  # the name that the caller knows
        raise


def write_text(path: Path, text: str, errors: str = "strict") -> None:
    with replaced(path) as file:
        file.write(text.encode(errors=errors))
