"""Programs of ranks, in a separate file because started processes import it by name: of test_command_line.py and
test_leaderboard_soak.py."""

import gc
import os
import time
from pathlib import Path


def raise_on_rank_1(report):
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ArithmeticError("on purpose")
    time.sleep(600)


def die(report):
    os.abort()


def raise_or_die_later(report, seconds):
    """Rank 0 raises at once, as one does whose peer is dying; rank 1 dies."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        raise ConnectionError("reset by peer")
    time.sleep(seconds)
    os.abort()


def hang(report):
    time.sleep(600)


def report_twice(report, word):
    report(word)
    report(word)
    return word.upper()


def resources(report):
    """Those of the rank's process: open files, mappings, threads, resident bytes; and the bytes in use on its GPU."""
    import torch

    gc.collect()
    status = Path("/proc/self/statm").read_text().split()
    free, total = torch.cuda.mem_get_info() if torch.cuda.is_initialized() else (0, 0)
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "mappings": sum(1 for _ in open("/proc/self/maps")),
        "threads": len(os.listdir("/proc/self/task")),
        "bytes": int(status[1]) * os.sysconf("SC_PAGE_SIZE"),
        "gpu_bytes": total - free,
    }
