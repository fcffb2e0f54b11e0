"""Starts the ranks of a command: one process each, unless torchrun has started them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from moe_a2a import _core, devices
from moe_a2a.arguments import MAX_RANKS
from moe_a2a.bench import routings
from moe_a2a.bench.cases import Case
from moe_a2a.commands.command_line import UsageError, integer
from moe_a2a.commands.rank_options import device_type_of, num_processes
from moe_a2a.rank_processes import RankError, run_on_ranks

REMEDY = "start the ranks with torchrun, or unset RANK and WORLD_SIZE"


def check_graphs(options: argparse.Namespace, *names: str) -> None:
    """names: options that ask for captured graphs."""
    asked_for = [f"--{name}" for name in names if getattr(options, name)]
    if asked_for and device_type_of(options) == "cpu":
        raise UsageError(f"{', '.join(asked_for)}: the CPU has no graphs; leave it out, or pass --device cuda")


def num_ranks_of(options: argparse.Namespace) -> int:
    if is_rank():
        num_ranks = int(os.environ["WORLD_SIZE"])
        if options.ranks not in (None, num_ranks):
            raise UsageError(f"--ranks {options.ranks}, but torchrun has started {num_ranks}; leave it out")
        return num_ranks
    return num_processes(options.ranks, device_type_of(options))


def is_rank() -> bool:
    """Whether torchrun has started this process. Raises UsageError if RANK and WORLD_SIZE are set, but not as torchrun does."""
    if not ("RANK" in os.environ and "WORLD_SIZE" in os.environ):
        return False
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        raise UsageError(f"RANK and WORLD_SIZE are set without {' and '.join(missing)}; {REMEDY}")
    _number_of_environment("RANK", 0, _number_of_environment("WORLD_SIZE", 1, MAX_RANKS) - 1)
    _number_of_environment("MASTER_PORT", 0, 65535)
    return True


def _number_of_environment(name: str, least: int, most: int) -> int:
    try:
        return integer(least, most)(os.environ[name])
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{name}: {error}; {REMEDY}") from None


def check_cases(cases: Sequence[Case], options: argparse.Namespace) -> None:
    """Rejects bad options once, before any rank starts; otherwise every rank would."""
    num_ranks, target = num_ranks_of(options), devices.target_of(torch.device(device_type_of(options)))
    for case in cases:
        sizes = (case.num_experts, case.num_topk, case.hidden, case.num_tokens)
        try:
            _core.nbytes_for(0, num_ranks, *sizes, 2, case.dtype, None, target)
        except ValueError as error:
            raise UsageError(str(error)) from None
        if case.num_topk > case.num_experts:
            raise UsageError(f"--topk {case.num_topk} > --experts {case.num_experts}: a token chooses distinct experts")
        if case.routing == "text" and case.num_topk > routings.TEXT_CHOICES:
            raise UsageError(f'--topk {case.num_topk} > {routings.TEXT_CHOICES}, the choices of --routing "text"')


def start_ranks(options: argparse.Namespace, main: Callable[[argparse.Namespace], int], name: str) -> int:
    """Runs main(options) on every rank; returns rank 0's exit code."""
    device_type = options.device = device_type_of(options)
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    num_ranks = num_ranks_of(options)
    if is_rank():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(backend)
        code = main(options)
        dist.destroy_process_group()
        return code
    try:
        how = {"timeout": options.timeout, "backend": backend, "device_type": device_type}
        return run_on_ranks(num_ranks, _run, main, options, **how)[0]
    except RankError as error:
        print(error.details, file=sys.stderr)
        print(f"{name}: FAILED {error}")
        return 1


def _run(report: Callable[[str], None], main: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """The program of a rank's process, which reports no progress."""
    return main(options)


def this_ranks_device(options: argparse.Namespace) -> torch.device:
    if options.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", dist.get_rank())))
    torch.cuda.set_device(device)
    return device
