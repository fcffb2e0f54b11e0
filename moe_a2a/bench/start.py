"""Starts the ranks of a command: a process each, or the one that torchrun has started."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from moe_a2a import devices
from moe_a2a.rank_processes import RankError, run_on_ranks


def start_ranks(
    options: argparse.Namespace, main: Callable[[Callable[[str], None], argparse.Namespace], int], name: str
) -> int:
    """main(report, options) on every rank; the exit code of rank 0."""
    device_type = options.device = options.device or devices.default_device_type()
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:  # torchrun has started us
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(backend)
        code = main(lambda text: None, options)
        dist.destroy_process_group()
        return code
    num_ranks = options.ranks or (torch.cuda.device_count() if device_type == "cuda" else 4)
    try:
        return run_on_ranks(num_ranks, main, options, timeout=options.timeout, backend=backend)[0]
    except RankError as error:
        print(error.traceback, file=sys.stderr)
        print(f"{name}: FAILED {error}")
        return 1


def this_ranks_device(options: argparse.Namespace) -> torch.device:
    if options.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", dist.get_rank())))
    torch.cuda.set_device(device)
    return device
