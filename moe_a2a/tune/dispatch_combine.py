"""`python -m moe_a2a tune`: measures the best number of blocks for dispatch and combine.

A call's blocks depend only on its number of tokens. So every number of tokens is measured with every number of blocks in two
modes: plain rows that combine sums, and float8 rows that the caller has summed; on a GPU as replayed graphs, since a slow host
would hide the difference. Each number of blocks is rated by the mode that it slows down most; the table keeps the
fewest within 2 % of the best.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import moe_a2a
from moe_a2a.bench import gate
from moe_a2a.bench.cases import Case, make_inputs
from moe_a2a.bench.clock import Clock
from moe_a2a.bench.contenders import Ours, OursInGraphs
from moe_a2a.bench.options import DTYPES
from moe_a2a.bench.start import check_cases
from moe_a2a.bench.statistics import medians_us
from moe_a2a.tables import launch_tables, tuned_files
from moe_a2a.tables.launch_tables import LaunchStep, TunedTable
from moe_a2a.tune.fewest_blocks import fewest_blocks

TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
GPU_BLOCKS = [4, 8, 16, 24, 32, 48, 64, 80, 96, 112]  # and one per multiprocessor
CPU_BLOCKS = [1, 2]
MODES = ("rows", "fp8+presummed")

Times = dict[str, tuple[list[float], list[float]]]  # per mode: of dispatch and of combine, by number of blocks


def check(options: argparse.Namespace) -> None:
    check_cases([_case(options, tokens) for tokens in options.tokens], options)


def about(options: argparse.Namespace) -> dict[str, Any]:
    return {"seed": options.seed, "topk": options.topk, "experts": options.experts}


def in_effect(options: argparse.Namespace, device: torch.device, num_ranks: int) -> str:
    sizes = options.hidden, DTYPES[options.dtype], options.topk
    steps, origin = launch_tables.in_effect(device, num_ranks, *sizes, options.output)
    return "\n".join([f", hidden {options.hidden} {options.dtype}: {origin}", *_lines(steps)])


def text(table: TunedTable) -> str:
    return "\n".join(_lines(table.steps))


def _lines(steps: Sequence[LaunchStep]) -> list[str]:
    header = [f"{'tokens at most':>14} {'dispatch blocks':>15} {'combine blocks':>14}"] if steps else []
    return header + [f"{step.max_tokens:>14} {step.dispatch_blocks:>15} {step.combine_blocks:>14}" for step in steps]


def measure(options: argparse.Namespace, device: torch.device, clock: Clock) -> TunedTable:
    blocks = options.blocks or _default_blocks(device)
    steps = []
    for tokens in sorted(set(options.tokens)):
        case = _case(options, tokens)
        times = _microseconds(case, blocks, clock, device)
        best = (_fewest(blocks, [of_mode[step] for of_mode in times.values()]) for step in (0, 1))
        steps.append(LaunchStep(tokens, *best))
        if dist.get_rank() == 0:
            _say(case, blocks, times, steps[-1])
    return TunedTable(options.hidden, options.dtype, tuple(tuned_files.merged(steps)), options.topk)


def _case(options: argparse.Namespace, num_tokens: int) -> Case:
    sizes = (options.hidden, options.topk, options.experts)
    return Case(num_tokens, *sizes, DTYPES[options.dtype], "uniform", options.seed)


def _microseconds(case: Case, blocks: list[int], clock: Clock, device: torch.device) -> Times:
    inputs = make_inputs(case, device)
    contender_class = OursInGraphs if device.type == "cuda" else Ours
    found = {}
    with moe_a2a.ExpertParallel(None, **case.config, device=device) as ep:
        for mode in MODES:
            contenders = [contender_class(ep, inputs, mode, num_blocks) for num_blocks in blocks]
            for contender in contenders:
                if wrong := gate.check(contender, inputs):
                    raise gate.WrongResultError(f"{case}, {mode}, {contender.num_blocks} blocks: {wrong}")
            medians = medians_us(clock.time([step for contender in contenders for step in contender.steps()]))
            found[mode] = (medians[0::2], medians[1::2])
    return found


def _fewest(blocks: list[int], times: list[list[float]]) -> int:
    """Judged by the mode that they slow down most. `times`: by mode, then by blocks."""
    return fewest_blocks({n: max(of_mode[i] / min(of_mode) for of_mode in times) for i, n in enumerate(blocks)})


def _default_blocks(device: torch.device) -> list[int]:
    if device.type != "cuda":
        return CPU_BLOCKS
    most = torch.cuda.get_device_properties(device).multi_processor_count
    return [blocks for blocks in GPU_BLOCKS if blocks < most] + [most]


def _say(case: Case, blocks: list[int], times: Times, step: LaunchStep) -> None:
    for mode, of_steps in times.items():
        for name, of_step, best in zip(("dispatch", "combine"), of_steps, step[1:], strict=True):
            figures = "  ".join(f"{n}: {time:.1f}" for n, time in zip(blocks, of_step, strict=True))
            line = f"{case.num_tokens:>6} {mode:<13} {name:<9} us by blocks  {figures}  ->  {best}"
            print(line, file=sys.stderr, flush=True)
