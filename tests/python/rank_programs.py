"""The ranks' programs of test_command_line.py, in a separate file because started processes import it by name."""

import os
import time


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
