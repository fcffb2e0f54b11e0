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
    Links, such as /dev/stdout, and anything but regular files are written to directly. An OSError names `path`."""
    is_direct = path.is_symlink() or (path.exists() and not path.is_file())
    written = path if is_direct else path.with_name(f"{path.name}.{os.getpid()}.{threading.get_native_id()}")
    try:
        with open(written, "wb") as file:
            yield file
        if not is_direct:
            written.replace(path)
    except BaseException as error:
        if not is_direct:
            with contextlib.suppress(OSError):
                written.unlink()
        # Without a name: a write to a full disk. Without a number: an error that has a text of its own.
        if isinstance(error, OSError) and error.errno is not None and error.filename in (None, str(written)):
            error.filename = str(path)
        raise


def write_text(path: Path, text: str, errors: str = "strict") -> None:
    with replaced(path) as file:
        file.write(text.encode(errors=errors))
