"""Bytes that ranks exchange through shared memory, as the operating system's kernel sees it from outside.

Before a call the kernel forgets which pages each rank's process has touched. After it, we count the touched pages of mappings
that more than one rank has. This covers every transport over shared memory, including moe_a2a's CPU target, whatever the
submission claims, but not sockets or GPU memory. A page counts whole (4 KiB), for each process that touches it, even if a
rank touched only its own part: the count is an upper bound, and exact when it is 0.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ ...(.) [0-9a-f]+ ([0-9a-f]+:[0-9a-f]+ [0-9]+)", re.MULTILINE)
REFERENCED = re.compile(r"^Referenced: +([0-9]+) kB", re.MULTILINE)


def forget_touched_pages(pids: list[int]) -> bool:
    """False if the kernel lacks the feature."""
    try:
        for pid in pids:
            Path(f"/proc/{pid}/clear_refs").write_text("1")
    except OSError:
        return False
    return True


def shared_bytes_touched(pids: list[int], without: os.stat_result) -> int:
    """without: a file whose pages do not count."""
    of_ranks = [_touched(Path(f"/proc/{pid}/smaps").read_text()) for pid in pids]
    for touched in of_ranks:
        touched.pop(_name_in_smaps(without), None)
    files = [set(touched) for touched in of_ranks]
    common = {
        file for number, own in enumerate(files) for file in own if any(file in other for other in files[:number])
    }
    return sum(nbytes for touched in of_ranks for file, nbytes in touched.items() if file in common)


def _name_in_smaps(file: os.stat_result) -> str:
    return f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x} {file.st_ino}"


def _touched(smaps: str) -> dict[str, int]:
    """Bytes by file, for shared mappings."""
    touched: dict[str, int] = {}
    mappings = list(MAPPING.finditer(smaps))
    ends = [mapping.start() for mapping in mappings[1:]] + [len(smaps)]
    for mapping, end in zip(mappings, ends, strict=True):
        kind, file = mapping.groups()
        referenced = REFERENCED.search(smaps, mapping.end(), end)
        if kind == "s" and referenced is not None:
            touched[file] = touched.get(file, 0) + 1024 * int(referenced.group(1))
    return touched
