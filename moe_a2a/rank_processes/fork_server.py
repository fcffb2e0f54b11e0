"""Imported by the fork server of rank processes: removes the temporary folder of its socket when the server ends. The process
that started it does so too, unless it was killed."""

import atexit
import os
import shutil
import socket
import stat
import time
from pathlib import Path

# For the process that started the server to remove the folder: it fails if the folder vanishes meanwhile.
SECONDS_TO_EXIT = 0.5


def _folder_of_listener() -> Path | None:
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
        except OSError:  # the descriptor of the listing
            continue
        with socket.socket(fileno=os.dup(number)) as opened:
            if opened.family == socket.AF_UNIX and opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return Path(opened.getsockname()).parent
    return None


def _remove(folder: Path, server: int) -> None:
    if os.getpid() != server:
        return
    time.sleep(SECONDS_TO_EXIT)
    shutil.rmtree(folder, ignore_errors=True)


_folder = _folder_of_listener()
if _folder is not None and _folder.name.startswith("pymp-"):  # made by multiprocessing
    atexit.register(_remove, _folder, os.getpid())
