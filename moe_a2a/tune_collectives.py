"""`python -m moe_a2a tune collectives`: measures algorithms, numbers of blocks, LL words and codecs, and writes the table behind
algorithm="auto" and codec="auto".

Calls are timed in place, back to back, as `bench all_reduce` does; on a GPU as one graph. For each size the table keeps the
fastest algorithm, then the fewest blocks within 2 % of its best. A codec pays from the size above which it is always
faster than no codec; LL words pay up to the size below which they are always faster than rows. A step ends at the largest
measured size with the same choice.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

import moe_a2a
from moe_a2a import collective_tables, tuned_files
from moe_a2a.bench import collectives as bench
from moe_a2a.bench import machine
from moe_a2a.bench.clock import Clock, Measuring
from moe_a2a.bench.options import DTYPES
from moe_a2a.bench.start import device_type_of, num_ranks_of, start_ranks, this_ranks_device
from moe_a2a.codecs import CODECS
from moe_a2a.collective_tables import KINDS, MOST_IN_WORDS, CollectiveStep, CollectiveTable
from moe_a2a.command_line import UsageError, output_file

SIZES = [1 << 10, 8 << 10, 32 << 10, 128 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20, 8 << 20, 32 << 20, 128 << 20]
GPU_BLOCKS = [16, 32, 64, 96]  # and as many as the library takes
CPU_BLOCKS = [1]
GOOD_ENOUGH = 1.02
ALGORITHMS = ("one_shot", "two_shot")

Way = tuple[str, int]  # algorithm, blocks


def run(options: argparse.Namespace) -> int:
    if options.only_print:
        return _print(options)
    try:
        output_file(options.output or tuned_files.OWN / "table.json")
        if options.output and options.output.exists():  # the new tables are merged into it
            collective_tables.read(options.output)
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise UsageError(str(error)) from None
    return start_ranks(options, rank_main, "tune")


def _print(options: argparse.Namespace) -> int:
    device, ranks = torch.device(device_type_of(options)), num_ranks_of(options)
    try:
        tables = collective_tables.in_effect(device, ranks, options.output)
    except ValueError as error:
        raise UsageError(str(error)) from None
    print(f"{ranks} ranks on {device.type}: {tables.origin}")
    for kind in KINDS:
        _print_table(tables.of(kind, options.dtype))
    return 0


def _print_table(table: CollectiveTable) -> None:
    print(f"{table.kind} of {table.dtype}\n{'bytes at most':>16} {'algorithm':<10} {'blocks':>6}")
    for step in table.steps:
        print(f"{step.max_nbytes:>16} {step.algorithm:<10} {step.num_blocks or 'all':>6}")
    if table.kind == "all_reduce":
        print(f"one_shot as LL words up to: {table.most_in_words}")
        print("codecs from: " + (", ".join(f"{name} {least}" for name, least in table.codecs.items()) or "never"))


def rank_main(report: Callable[[str], None], options: argparse.Namespace) -> int:
    device = this_ranks_device(options)
    clock = Clock(device, Measuring(options.iterations, options.warm_up, options.flush))
    blocks = [0, *(options.blocks or (GPU_BLOCKS if device.type == "cuda" else CPU_BLOCKS))]
    sizes = sorted(options.sizes or SIZES)
    is_first = dist.get_rank() == 0
    tables = []
    with moe_a2a.Collectives(dist.group.WORLD, device=device) as coll:
        for kind in KINDS:
            tables.append(_measured(kind, DTYPES[options.dtype], sizes, blocks, coll, clock))
    if is_first:
        path = options.output or collective_tables.own_file(device, dist.get_world_size())
        collective_tables.write(path, machine.about(device, dist.get_world_size()), tables)
        for table in tables:
            _print_table(table)
        print(f"tune: {path}", flush=True)
    dist.barrier()
    return 0


def _measured(
    kind: str, dtype: torch.dtype, sizes: list[int], blocks: list[int], coll: moe_a2a.Collectives, clock: Clock
) -> CollectiveTable:
    algorithms = ALGORITHMS if kind == "all_reduce" else ALGORITHMS[1:]
    ways = [(algorithm, count) for algorithm in algorithms for count in blocks]
    steps, with_codec, with_words = [], [], []
    for size in sizes:
        case = bench.Case(kind, size, dtype, "sum", coll.device)
        times = {way: _microseconds(case, coll, way, None, clock) for way in ways}
        if kind == "all_reduce" and size <= MOST_IN_WORDS and coll.device.type in collective_tables.WORDS_RUN_ON:
            in_words = {way: _microseconds(case, coll, way, None, clock, True) for way in ways if way[0] == "one_shot"}
            with_words.append(min(in_words.values()) < min(times[way] for way in in_words))
            if all(with_words):
                times |= in_words
        steps.append(CollectiveStep(size, *best(times)))
        if kind == "all_reduce":
            coded = {codec: _microseconds(case, coll, ("two_shot", 0), codec, clock) for codec in CODECS}
            with_codec.append({codec: time < min(times.values()) for codec, time in coded.items()})
            times |= {(codec, 0): time for codec, time in coded.items()}
        if dist.get_rank() == 0:
            figures = "  ".join(f"{name}/{count or 'all'}: {time:.1f}" for (name, count), time in times.items())
            print(f"{kind:<14} {size:>10}  us  {figures}  ->  {steps[-1][1:]}", file=sys.stderr, flush=True)
    name = str(dtype).removeprefix("torch.")
    words = most_in_words(sizes[: len(with_words)], with_words)
    return CollectiveTable(kind, name, tuple(merged(steps)), worth_it(sizes, with_codec), words)


def _microseconds(
    case: bench.Case, coll: moe_a2a.Collectives, way: Way, codec: str | None, clock: Clock, as_words: bool = False
) -> float:
    algorithm, num_blocks = way
    step = CollectiveStep(case.x.nbytes, algorithm, num_blocks)
    words = MOST_IN_WORDS if as_words else 0
    tables = [CollectiveTable(kind, "bfloat16", (step,), most_in_words=words) for kind in KINDS]
    coll.tables = collective_tables.Tables(tables, "tune")
    if case.kind == "all_reduce":
        call: Callable[[], object] = lambda: coll.all_reduce(case.x, case.op, codec=codec, out=case.x)  # noqa: E731
    elif case.kind == "reduce_scatter":
        call = lambda: coll.reduce_scatter(case.x, case.op, out=case.share)  # noqa: E731
    else:
        call = lambda: coll.all_gather(case.share, out=case.x)  # noqa: E731
    line = bench.measure(case, bench.Contender("", call, case.x, codec), clock, case.x.is_cuda)
    if line.num_wrong:
        raise RuntimeError(
            f"{case.kind} of {line.size} bytes, {algorithm}, {num_blocks} blocks, {codec}: {line.num_wrong} wrong"
        )
    return line.time_us


def best(times: dict[Way, float]) -> Way:
    """The fastest algorithm, and the fewest blocks within GOOD_ENOUGH of its best time. 0 means all blocks, the most."""
    algorithm = min(times, key=lambda way: times[way])[0]
    own = {count: time for (name, count), time in times.items() if name == algorithm}
    good = [count for count, time in own.items() if time <= GOOD_ENOUGH * min(own.values())]
    return algorithm, min(good, key=lambda count: count or collective_tables.LARGEST)


def merged(steps: Sequence[CollectiveStep]) -> list[CollectiveStep]:
    """Merges adjacent steps with the same choice."""
    found: list[CollectiveStep] = []
    for step in steps:
        if found and found[-1][1:] == step[1:]:
            found.pop()
        found.append(step)
    return found


def most_in_words(sizes: Sequence[int], is_faster: Sequence[bool]) -> int:
    """The largest measured size up to which LL words are always faster than rows; 0: none."""
    slower = [i for i, faster in enumerate(is_faster) if not faster]
    end = slower[0] if slower else len(is_faster)
    return sizes[end - 1] if end > 0 else 0


def worth_it(sizes: Sequence[int], is_faster: Sequence[dict[str, bool]]) -> dict[str, int]:
    """For each codec, the smallest measured size from which it is always faster than no codec."""
    least = {}
    for codec in CODECS if is_faster else ():
        for size, faster in zip(reversed(sizes), reversed(is_faster), strict=True):
            if not faster[codec]:
                break
            least[codec] = size
    return least
