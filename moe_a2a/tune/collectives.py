"""`python -m moe_a2a tune collectives`: measures algorithms, numbers of blocks, LL words and codecs for algorithm="auto" and
codec="auto".

Calls are timed in place, back to back, as `bench all_reduce` does; on a GPU as one graph. For each size the table keeps the
fastest algorithm, then the fewest blocks within 2 % of its best. A codec pays from the size above which it is always
faster than no codec; LL words pay up to the size below which they are always faster than rows. Tensors in symmetric memory
have steps of their own, with "direct" among the algorithms. A step ends at the largest measured size with the same choice.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import moe_a2a
from moe_a2a.bench import collectives as bench
from moe_a2a.bench.clock import Clock
from moe_a2a.bench.options import DTYPES
from moe_a2a.bench.start import num_ranks_of
from moe_a2a.codecs import CODECS
from moe_a2a.commands.command_line import UsageError
from moe_a2a.tables import collective_tables, tuned_files
from moe_a2a.tables.collective_tables import KINDS, MOST_IN_WORDS, CollectiveStep, CollectiveTable
from moe_a2a.tune.fewest_blocks import fewest_blocks

SIZES = [kib << 10 for kib in (1, 8, 32, 128, 512)] + [mib << 20 for mib in (1, 2, 4, 8, 16, 32, 128)]
GPU_BLOCKS = [16, 32, 64, 96]  # and as many as the library takes
CPU_BLOCKS = [1]
ALGORITHMS = ("one_shot", "two_shot")

Way = tuple[str, int]  # algorithm, blocks


def check(options: argparse.Namespace) -> None:
    """Raises UsageError for sizes that are not measured: a tensor has at least an element per rank."""
    num_ranks, smallest = num_ranks_of(options), min(options.sizes)
    if smallest < (least := num_ranks * DTYPES[options.dtype].itemsize):
        raise UsageError(
            f"--sizes {smallest}: less than {least} bytes, an element of {options.dtype} for each of {num_ranks} ranks; pass "
            "sizes that occur in your calls; larger calls use the entry of the largest"
        )


def about(options: argparse.Namespace) -> dict[str, Any]:
    return {}


def in_effect(options: argparse.Namespace, device: torch.device, num_ranks: int) -> str:
    tables = collective_tables.in_effect(device, num_ranks, options.output)
    return f": {tables.origin}\n" + text([tables.of(kind, options.dtype) for kind in KINDS])


def text(tables: Sequence[CollectiveTable]) -> str:
    lines = []
    for table in tables:
        lines += [f"{table.kind} of {table.dtype}", f"{'bytes at most':>16} {'algorithm':<10} {'blocks':>6}"]
        lines += map(_line, table.steps)
        if table.kind == "all_reduce":
            codecs = ", ".join(f"{name} {least}" for name, least in table.codecs.items())
            words = f"up to {table.most_in_words} bytes" if table.most_in_words else "never"
            lines += [f"one_shot as LL words: {words}", f"codecs from: {codecs or 'never'}"]
            lines += ["tensors in symmetric memory (empty()):", *map(_line, table.symmetric_steps)]
    return "\n".join(lines)


def _line(step: CollectiveStep) -> str:
    most = "any" if step.max_nbytes == collective_tables.LARGEST else step.max_nbytes
    return f"{most:>16} {step.algorithm:<10} {step.num_blocks or 'all':>6}"


def measure(options: argparse.Namespace, device: torch.device, clock: Clock) -> list[CollectiveTable]:
    blocks = [0, *(options.blocks or (GPU_BLOCKS if device.type == "cuda" else CPU_BLOCKS))]
    sizes = sorted(set(options.sizes))
    most = bench.most_nbytes(sizes)
    with moe_a2a.Collectives(dist.group.WORLD, symmetric_nbytes=most, device=device) as coll:
        memory = coll.empty(most, dtype=torch.uint8)
        return [_measured(kind, DTYPES[options.dtype], sizes, blocks, coll, memory, clock) for kind in KINDS]


def _measured(
    kind: str,
    dtype: torch.dtype,
    sizes: list[int],
    blocks: list[int],
    coll: moe_a2a.Collectives,
    memory: torch.Tensor,
    clock: Clock,
) -> CollectiveTable:
    steps, symmetric, with_codec, with_words = [], [], [], []
    for size in sizes:
        algorithms = ALGORITHMS if kind == "all_reduce" and coll._fits_one_shot(size) else ALGORITHMS[1:]
        ways = [(algorithm, count) for algorithm in algorithms for count in blocks]
        case = bench.Case(kind, size, dtype, "sum", coll.device)
        times = {way: _microseconds(case, coll, way, None, clock) for way in ways}
        if kind == "all_reduce" and size <= MOST_IN_WORDS:
            in_words = {way: _microseconds(case, coll, way, None, clock, True) for way in ways if way[0] == "one_shot"}
            with_words.append(min(in_words.values()) < min(times[way] for way in in_words))
            if all(with_words):
                times |= in_words
        steps.append(CollectiveStep(size, *best(times)))
        if kind == "all_reduce":
            coded = {codec: _microseconds(case, coll, ("two_shot", 0), codec, clock) for codec in CODECS}
            with_codec.append({codec: time < min(times.values()) for codec, time in coded.items()})
            direct = {("direct", 0): _microseconds_direct(case, coll, memory, clock)}
            symmetric.append(CollectiveStep(size, *best(times | direct)))
            times |= {(codec, 0): time for codec, time in coded.items()} | direct
        if dist.get_rank() == 0:
            figures = "  ".join(f"{name}/{count or 'all'}: {time:.1f}" for (name, count), time in times.items())
            print(f"{kind:<14} {size:>10}  us  {figures}  ->  {steps[-1][1:]}", file=sys.stderr, flush=True)
    name = str(dtype).removeprefix("torch.")
    words = most_in_words(sizes[: len(with_words)], with_words)
    return CollectiveTable(
        kind,
        name,
        tuple(tuned_files.merged(steps)),
        worth_it(sizes, with_codec),
        words,
        tuple(tuned_files.merged(symmetric)),
    )


def _microseconds(
    case: bench.Case, coll: moe_a2a.Collectives, way: Way, codec: str | None, clock: Clock, as_words: bool = False
) -> float:
    algorithm, num_blocks = way
    step = CollectiveStep(case.x.nbytes, algorithm, num_blocks)
    words = MOST_IN_WORDS if as_words else 0
    tables = [CollectiveTable(kind, "bfloat16", (step,), most_in_words=words) for kind in KINDS]
    coll.tables = collective_tables.Tables(tables, "tune")
    (contender,) = bench.moe_a2a_calls(case, coll, [] if codec else ["auto"], [codec] if codec else [])
    return _time_us(case, contender, clock, f"{algorithm}, {num_blocks} blocks, {codec}")


def _microseconds_direct(case: bench.Case, coll: moe_a2a.Collectives, memory: torch.Tensor, clock: Clock) -> float:
    symmetric = bench.Case(case.kind, case.x.nbytes, case.dtype, case.op, coll.device, memory)
    (contender,) = bench.moe_a2a_calls(symmetric, coll, ["direct"], [])
    return _time_us(symmetric, contender, clock, "direct")


def _time_us(case: bench.Case, contender: bench.Contender, clock: Clock, how: str) -> float:
    line = bench.measure(case, contender, clock, case.x.is_cuda)
    if line.num_wrong:
        raise RuntimeError(f"{case.kind} of {line.size} bytes, {how}: {line.num_wrong} wrong")
    return line.time_us


def best(times: dict[Way, float]) -> Way:
    """The fastest algorithm, and the fewest blocks about as fast."""
    algorithm = min(times, key=lambda way: times[way])[0]
    return algorithm, fewest_blocks({count: time for (name, count), time in times.items() if name == algorithm})


def most_in_words(sizes: Sequence[int], is_faster: Sequence[bool]) -> int:
    """The largest measured size up to which LL words are always faster than rows; 0: none."""
    slower = [i for i, faster in enumerate(is_faster) if not faster]
    end = slower[0] if slower else len(is_faster)
    return sizes[end - 1] if end > 0 else 0


def worth_it(sizes: Sequence[int], is_faster: Sequence[dict[str, bool]]) -> dict[str, int]:
    """For each name, the smallest measured size from which it is always faster."""
    least = {}
    for name in is_faster[0] if is_faster else ():
        for size, faster in zip(reversed(sizes), reversed(is_faster), strict=True):
            if not faster[name]:
                break
            least[name] = size
    return least
