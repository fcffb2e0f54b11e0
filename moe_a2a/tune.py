"""`python -m moe_a2a tune`: measures the best number of blocks for dispatch and combine on this machine, and writes the
table. `tune collectives` does the same for Collectives: see tune_collectives.py.

A call's blocks depend only on its number of tokens. So every number of tokens is measured with every number of blocks in two
modes: plain rows that combine sums, and float8 rows that the caller has summed. The table keeps the fewest blocks within
2 % of the best, judged by the mode that they slow down most, and leaves the other SMs to other kernels. `--print` shows the
table in effect.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import moe_a2a
from moe_a2a import launch_tables, tune_collectives, tuned_files
from moe_a2a.bench import gate, machine
from moe_a2a.bench.cases import Case, make_inputs
from moe_a2a.bench.clock import Clock, Measuring
from moe_a2a.bench.contenders import Ours
from moe_a2a.bench.options import DTYPES, add_how, add_sizes
from moe_a2a.bench.start import check_cases, device_type_of, num_ranks_of, start_ranks, this_ranks_device
from moe_a2a.bench.statistics import slowest_rank_median
from moe_a2a.command_line import UsageError, integers, output_file
from moe_a2a.launch_tables import LaunchStep, TunedTable

HELP = "measure the best number of blocks per call, or print the table in effect"
TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
GPU_BLOCKS = [4, 8, 16, 24, 32, 48, 64, 80, 96, 112]  # and one per multiprocessor
CPU_BLOCKS = [1, 2]
GOOD_ENOUGH = 1.02
MODES = ("rows", "fp8+presummed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", choices=("dispatch_combine", "collectives"), default="dispatch_combine",
                        help="which table (default: dispatch_combine)")  # fmt: skip
    parser.add_argument("--print", action="store_true", dest="only_print", help="show the table in effect here")
    parser.add_argument("--tokens", type=integers(1), default=TOKENS, metavar="1,2,...", help="of each rank")
    parser.add_argument(
        "--sizes", type=integers(1), metavar="8192,...", help="bytes of the whole tensor, of collectives"
    )
    parser.add_argument(
        "--blocks", type=integers(1), metavar="8,16,...", help="to try (default: up to all multiprocessors)"
    )
    add_sizes(parser)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    parser.add_argument("--output", type=Path, metavar="FILE",
                        help="where to write the table (default: the user's cache directory, where it is found automatically)")  # fmt: skip
    add_how(parser)


def run(options: argparse.Namespace) -> int:
    if options.what == "collectives":
        return tune_collectives.run(options)
    check_cases([_case(options, tokens) for tokens in options.tokens], options)
    if options.only_print:
        return _print(options)
    try:
        output_file(options.output or tuned_files.OWN / "table.json")
        if options.output and options.output.exists():  # the new table is merged into it
            launch_tables.read(options.output)
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise UsageError(str(error)) from None
    return start_ranks(options, rank_main, "tune")


def _print(options: argparse.Namespace) -> int:
    device = torch.device(device_type_of(options))
    ranks, dtype = num_ranks_of(options), DTYPES[options.dtype]
    try:
        steps, origin = launch_tables.in_effect(device, ranks, options.hidden, dtype, options.topk, options.output)
    except ValueError as error:
        raise UsageError(str(error)) from None
    print(f"{ranks} ranks on {device.type}, hidden {options.hidden} {options.dtype}: {origin}")
    _print_steps(steps)
    return 0


def _print_steps(steps: list[LaunchStep]) -> None:
    if steps:
        print(f"{'tokens at most':>14} {'dispatch blocks':>15} {'combine blocks':>14}")
    for step in steps:
        print(f"{step.max_tokens:>14} {step.dispatch_blocks:>15} {step.combine_blocks:>14}")


def rank_main(report: Callable[[str], None], options: argparse.Namespace) -> int:
    device = this_ranks_device(options)
    blocks = options.blocks or _default_blocks(device)
    clock = Clock(device, Measuring(options.iterations, options.warm_up, options.flush))
    is_first = dist.get_rank() == 0
    steps = []
    for tokens in sorted(options.tokens):
        case = _case(options, tokens)
        times = _microseconds(case, blocks, clock, device)
        dispatch, combine = (_fewest(blocks, [of_mode[step] for of_mode in times.values()]) for step in (0, 1))
        steps.append(LaunchStep(tokens, dispatch, combine))
        if is_first:
            _say(case, blocks, times, steps[-1])
    if is_first:
        table = TunedTable(options.hidden, options.dtype, tuple(_merged(steps)))
        path = options.output or launch_tables.own_file(device, dist.get_world_size())
        about = machine.about(device, dist.get_world_size()) | {"seed": options.seed, "topk": options.topk}
        launch_tables.write(path, about | {"experts": options.experts}, table)
        _print_steps(list(table.steps))
        print(f"tune: {path}", flush=True)
    dist.barrier()
    return 0


def _case(options: argparse.Namespace, num_tokens: int) -> Case:
    sizes = (options.hidden, options.topk, options.experts)
    return Case(num_tokens, *sizes, DTYPES[options.dtype], "uniform", options.seed)


def _microseconds(
    case: Case, blocks: list[int], clock: Clock, device: torch.device
) -> dict[str, tuple[list[float], list[float]]]:
    """Per mode: the times of dispatch and of combine, by number of blocks."""
    inputs = make_inputs(case, device)
    found = {}
    with moe_a2a.ExpertParallel(None, **case.config, device=device) as ep:
        for mode in MODES:
            contenders = [Ours(ep, inputs, mode, num_blocks) for num_blocks in blocks]
            for contender in contenders:
                if wrong := gate.check(contender, inputs):
                    raise gate.WrongResultError(f"{case}, {mode}, {contender.num_blocks} blocks: {wrong}")
            times = clock.time([step for contender in contenders for step in contender.steps()])
            medians = [1e6 * slowest_rank_median(times[:, i]) for i in range(times.shape[1])]
            found[mode] = (medians[0::2], medians[1::2])
    return found


def _fewest(blocks: list[int], times: list[list[float]]) -> int:
    """The fewest blocks within GOOD_ENOUGH of the best, judged by the mode that they slow down most. `times`: by mode,
    then by blocks."""
    losses = [max(of_mode[i] / min(of_mode) for of_mode in times) for i in range(len(blocks))]
    return min(n for n, loss in zip(blocks, losses, strict=True) if loss <= GOOD_ENOUGH * min(losses))


def _merged(steps: list[LaunchStep]) -> list[LaunchStep]:
    """Merges adjacent steps with the same blocks."""
    merged: list[LaunchStep] = []
    for step in steps:
        if merged and merged[-1][1:] == step[1:]:
            merged.pop()
        merged.append(step)
    return merged


def _default_blocks(device: torch.device) -> list[int]:
    if device.type != "cuda":
        return CPU_BLOCKS
    most = torch.cuda.get_device_properties(device).multi_processor_count
    return [blocks for blocks in GPU_BLOCKS if blocks < most] + [most]


def _say(case: Case, blocks: list[int], times: dict[str, tuple[list[float], list[float]]], step: LaunchStep) -> None:
    for mode, of_steps in times.items():
        for name, of_step, best in zip(("dispatch", "combine"), of_steps, step[1:], strict=True):
            figures = "  ".join(f"{n}: {time:.1f}" for n, time in zip(blocks, of_step, strict=True))
            line = f"{case.num_tokens:>6} {mode:<13} {name:<9} us by blocks  {figures}  ->  {best}"
            print(line, file=sys.stderr, flush=True)
