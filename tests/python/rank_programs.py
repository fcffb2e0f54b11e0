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


def hang(report):
    time.sleep(600)


def report_twice(report, word):
    report(word)
    report(word)
    return word.upper()
