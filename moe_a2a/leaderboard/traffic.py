"""Bytes that ranks exchange through shared memory, as the kernel of the operating system sees it from outside.

Before a call the kernel forgets which pages each rank's process has touched; after it, the touched pages of mappings that more
than one rank has are counted. Sees: every transport over shared memory, moe_a2a's CPU target among them, whatever the
submission says. Does not see: sockets, GPU memory. A page counts whole (4 KiB), for each process that touches it, and also when a
rank only touched its own part: an upper bound, and exact when it is 0.
"""

from __future__ import annotations

import re
from pathlib import Path

MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ ...(.) [0-9a-f]+ ([0-9a-f]+:[0-9a-f]+ [0-9]+)", re.MULTILINE)
REFERENCED = re.compile(r"^Referenced: +([0-9]+) kB", re.MULTILINE)


def forget_touched_pages(pids: list[int]) -> bool:
    """False where the kernel offers no such thing."""
    try:
        for pid in pids:
            Path(f"/proc/{pid}/clear_refs").write_text("1")
    except OSError:
        return False
    return True


def shared_bytes_touched(pids: list[int]) -> int:
    of_ranks = [_touched(Path(f"/proc/{pid}/smaps").read_text()) for pid in pids]
    files = [set(touched) for touched in of_ranks]
    common = {
        file for number, own in enumerate(files) for file in own if any(file in other for other in files[:number])
    }
    return sum(nbytes for touched in of_ranks for file, nbytes in touched.items() if file in common)


def _touched(smaps: str) -> dict[str, int]:
    """Bytes by file, of mappings that are shared."""
    touched: dict[str, int] = {}
    mappings = list(MAPPING.finditer(smaps))
    ends = [mapping.start() for mapping in mappings[1:]] + [len(smaps)]
    for mapping, end in zip(mappings, ends, strict=True):
        kind, file = mapping.groups()
        referenced = REFERENCED.search(smaps, mapping.end(), end)
        if kind == "s" and referenced is not None:
            touched[file] = touched.get(file, 0) + 1024 * int(referenced.group(1))
    return touched
