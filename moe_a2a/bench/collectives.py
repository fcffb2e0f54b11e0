"""`python -m moe_a2a bench all_reduce | reduce_scatter | all_gather`: Collectives beside gloo or NCCL in one run, with the
columns of nccl-tests.

Starts a process per rank; under torchrun it is a rank itself.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist

import moe_a2a
from moe_a2a import codecs
from moe_a2a.bench import machine
from moe_a2a.bench.clock import Clock, Measuring, Step
from moe_a2a.bench.contenders import captured
from moe_a2a.bench.options import DTYPES, add_how, dtypes, is_written, some_of
from moe_a2a.bench.start import check_graphs, num_ranks_of, start_ranks, this_ranks_device
from moe_a2a.bench.statistics import of_all_ranks
from moe_a2a.collectives import ALGORITHMS, CODECS, OPS
from moe_a2a.commands.baselines import all_gather_single, reduce_scatter_single
from moe_a2a.commands.command_line import UsageError, integer, integers, output_file
from moe_a2a.commands.rank_options import device_type_of

DEFAULT_SIZES = [4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]
REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "avg": dist.ReduceOp.AVG,
}
Merge = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
MERGES: dict[str, Merge] = {"sum": torch.add, "avg": torch.add, "max": torch.maximum, "min": torch.minimum}
BYTES_PER_ROUND = 16 << 20  # a round makes this many bytes of back-to-back calls, at most 50 calls
LARGEST = 15  # magnitude of the test's values
HEADER = (
    f"{'size':>10} {'count':>10} {'type':<9} {'redop':<5}  {'system':<28} {'time':>9} {'algbw':>7} {'busbw':>7} {'#wrong':>6}"
    f"  {'min':>9} {'avg':>9} {'max':>9}"
)
UNITS = (
    f"{'(B)':>10} {'(elements)':>10} {'':<9} {'':<5}  {'':<28} {'(us)':>9} {'(GB/s)':>7} {'(GB/s)':>7} {'':>6}"
    f"  {'(us)':>9} {'(us)':>9} {'(us)':>9}"
)


@dataclass(frozen=True)
class Line:
    """One contender at one size. Times in us, per call of a round of back-to-back calls; `time_us`: the slowest rank's
    median; min, avg and max: over all ranks and rounds."""

    kind: str
    size: int
    count: int
    dtype: str
    op: str
    system: str
    time_us: float
    algbw: float
    busbw: float
    num_wrong: int
    min_us: float
    avg_us: float
    max_us: float

    def __str__(self) -> str:
        return (
            f"{self.size:>10} {self.count:>10} {self.dtype:<9} {self.op:<5}  {self.system:<28} {self.time_us:9.1f}"
            f" {self.algbw:7.2f} {self.busbw:7.2f} {self.num_wrong:>6}  {self.min_us:9.1f} {self.avg_us:9.1f} {self.max_us:9.1f}"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is measured")
    what.add_argument("--sizes", type=integers(1), default=DEFAULT_SIZES, metavar="4096,65536,...",
                      help="bytes of the whole tensor, for reduce_scatter and all_gather of all ranks' parts (default: 4 KiB to 64 MiB)")  # fmt: skip
    what.add_argument("--dtype", type=dtypes, default=[torch.float32], metavar="TYPE,...",
                      help=f"{', '.join(DTYPES)} (default: float32)")  # fmt: skip
    what.add_argument("--op", choices=OPS, default="sum", help="default: sum")
    what.add_argument("--algorithms", type=some_of(ALGORITHMS), default=["auto"], metavar="NAME,...",
                      help=f"all_reduce: {', '.join(ALGORITHMS)} (default: auto); the others: direct, in a line of its own")  # fmt: skip
    what.add_argument("--codecs", type=some_of(CODECS, or_none=True), default=[], metavar="NAME,...",
                      help=f"all_reduce: time these beside no codec: {', '.join(CODECS)}")  # fmt: skip
    what.add_argument(
        "--blocks", type=integer(0), default=0, help="num_blocks of Collectives (default: 0, chosen by the table)"
    )
    what.add_argument("--graph", action="store_true", help="run the calls of a round as one CUDA graph (GPU)")
    add_how(parser)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the results here")


def run(options: argparse.Namespace) -> int:
    check_graphs(options, "graph")
    if options.kind != "all_reduce":
        if others := [name for name in options.algorithms if name not in ("auto", "direct")]:
            raise UsageError(
                f"--algorithms {','.join(others)}: {options.kind} has no choice but direct; leave it out, or pass direct"
            )
        if options.codecs:
            raise UsageError(f"--codecs {','.join(options.codecs)}: {options.kind} has no codecs; leave it out")
    if device_type_of(options) == "cpu":
        nbytes = max(_nbytes(options.kind, max(options.sizes), dtype, num_ranks_of(options)) for dtype in options.dtype)
        what = f"--sizes {max(options.sizes)}: the tensors of all ranks and the check of their values"
        machine.check_memory(what, nbytes, "pass smaller --sizes or --ranks")
    return start_ranks(options, rank_main, "bench")


def _nbytes(kind: str, size: int, dtype: torch.dtype, ranks: int) -> int:
    """Memory of all ranks for a case. Each has its tensor, and in num_wrong() three doubles per element; in all_gather the expected
    element and two int64."""
    of_check = dtype.itemsize + 16 if kind == "all_gather" else 24
    return ranks * (size + size // dtype.itemsize * of_check)


def rank_main(options: argparse.Namespace) -> int:
    device = this_ranks_device(options)
    clock = Clock(device, Measuring.of(options))
    is_first, lines = dist.get_rank() == 0, []
    about = machine.about(device)
    if is_first:
        print(
            f"# {options.kind}, {about['ranks']} ranks on {about['machine']}; torch {about['versions']['torch']}, in place"
        )
        print(f"{HEADER}\n{UNITS}", flush=True)
    most = most_nbytes(options.sizes) if "direct" in options.algorithms else 0
    with moe_a2a.Collectives(dist.group.WORLD, num_blocks=options.blocks, symmetric_nbytes=most, device=device) as coll:
        memory = coll.empty(most, dtype=torch.uint8)
        for dtype in options.dtype:
            for size in options.sizes:
                for case, contender in contenders(size, dtype, coll, memory, options):
                    line = measure(case, contender, clock, options.graph)
                    lines.append(line)
                    if is_first:
                        print(line, flush=True)
    has_failed = any(line.num_wrong for line in lines)
    if is_first and options.json:
        content = {"about": about, "lines": [asdict(line) for line in lines]}
        has_failed |= not is_written(options.json, json.dumps(content, indent=1))
    dist.barrier()
    return int(has_failed)


def most_nbytes(sizes: list[int]) -> int:
    """The bytes of the largest tensor in any Case of these sizes; each has at least an element per rank."""
    return max(dist.get_world_size() * max(dtype.itemsize for dtype in DTYPES.values()), *sizes)


class Case:
    """The tensors of one size, in place: this rank's share is a view of the whole tensor. memory: bytes for it; None: new."""

    def __init__(
        self,
        kind: str,
        size: int,
        dtype: torch.dtype,
        op: str,
        device: torch.device,
        memory: torch.Tensor | None = None,
    ):
        self.kind, self.op, self.dtype = kind, op, dtype
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        count = max(1, size // dtype.itemsize)
        if kind != "all_reduce":
            count = max(1, count // self.ranks) * self.ranks
        if memory is None:
            self.x = torch.empty(count, dtype=dtype, device=device)
        else:
            self.x = memory[: count * dtype.itemsize].view(dtype)
        self.share = self.x.view(self.ranks, -1)[self.rank] if kind != "all_reduce" else self.x

    def values(self, rank: int) -> torch.Tensor:
        """Small integers: sums over few ranks are exact in every dtype."""
        return ((torch.arange(self.x.numel(), device=self.x.device) * 7 + rank * 5) % 31 - LARGEST).to(self.dtype)

    def fill(self, x: torch.Tensor) -> None:
        if self.kind == "all_gather":
            x.fill_(float("nan"))
            self.share.copy_(self.values(self.rank).view(self.ranks, -1)[self.rank])
        else:
            x.copy_(self.values(self.rank))

    def num_wrong(self, out: torch.Tensor, codec: str | None) -> int:
        """Wrong elements on all ranks; with a codec, elements beyond its error bound."""
        if self.kind == "all_gather":
            whole = torch.empty_like(self.x)
            for r, share in enumerate(whole.view(self.ranks, -1)):
                share.copy_(self.values(r).view(self.ranks, -1)[r])
            wrong = (out != whole).sum()
        else:
            merged = reduce(MERGES[self.op], (self.values(r).double() for r in range(self.ranks)))
            expected = (merged / self.ranks if self.op == "avg" else merged).float().to(self.dtype)
            if self.kind == "reduce_scatter":
                expected = expected.view(self.ranks, -1)[self.rank]
            bound = 0.0
            if codec is not None:
                bound = self.ranks * LARGEST * (codecs.max_error(codec) + 2 * torch.finfo(self.dtype).eps)
            wrong = (~((out.double() - expected.double()).abs() <= bound)).sum()
        total = wrong.double().cpu()
        dist.all_reduce(total)
        return int(total.item())

    def bus_factor(self) -> float:
        """The share of the tensor's bytes that at least crosses each rank's link, as in nccl-tests."""
        return (2 if self.kind == "all_reduce" else 1) * (self.ranks - 1) / self.ranks


@dataclass(frozen=True)
class Contender:
    system: str
    call: Callable[[], Any]  # all_reduce: x becomes the result, or the call returns it
    x: torch.Tensor
    codec: str | None = None


def contenders(
    size: int, dtype: torch.dtype, coll: moe_a2a.Collectives, memory: torch.Tensor, options: argparse.Namespace
) -> list[tuple[Case, Contender]]:
    """memory: bytes of symmetric memory, for direct calls."""
    case = Case(options.kind, size, dtype, options.op, coll.device)
    on_gpu = case.x.device.type == "cuda"
    of_case = moe_a2a_calls(case, coll, [name for name in options.algorithms if name != "direct"], options.codecs)
    if on_gpu or case.op != "avg":  # gloo has no average
        of_case.append(Contender("nccl" if on_gpu else "gloo", distributed_call(case), case.x))
    if on_gpu and case.kind == "all_reduce" and case.op == "sum":
        of_case += symmetric_memory_calls(case)
    every = [(case, contender) for contender in of_case]
    if "direct" in options.algorithms:
        symmetric = Case(options.kind, size, dtype, options.op, coll.device, memory)
        every += [(symmetric, contender) for contender in moe_a2a_calls(symmetric, coll, ["direct"], [])]
    return every


def moe_a2a_calls(
    case: Case, coll: moe_a2a.Collectives, algorithms: list[str], names_of_codecs: list[str]
) -> list[Contender]:
    system = "moe_a2a direct" if algorithms == ["direct"] else "moe_a2a"
    if case.kind == "reduce_scatter":
        return [Contender(system, lambda: coll.reduce_scatter(case.x, case.op, out=case.share), case.x)]
    if case.kind == "all_gather":
        return [Contender(system, lambda: coll.all_gather(case.share, out=case.x), case.x)]
    how: list[tuple[str, str, str | None]] = [(name, name, None) for name in algorithms]
    how += [(f"two_shot {codec}", "auto", codec) for codec in names_of_codecs]
    return [
        Contender(
            f"moe_a2a {system}", partial(coll.all_reduce, case.x, case.op, name, codec, out=case.x), case.x, codec
        )
        for system, name, codec in how
    ]


def distributed_call(case: Case) -> Callable[[], Any]:
    """The call of torch.distributed."""
    if case.kind == "all_reduce":
        return lambda: dist.all_reduce(case.x, REDUCE_OPS[case.op])
    if case.kind == "reduce_scatter":
        return lambda: reduce_scatter_single(case.share, case.x, REDUCE_OPS[case.op])
    return lambda: all_gather_single(case.x, case.share)


def symmetric_memory_calls(case: Case) -> list[Contender]:
    """PyTorch's own kernels on its symmetric memory, if this version has them and accepts the tensor."""
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    try:
        import torch.distributed._symmetric_memory as symm_mem

        x = symm_mem.empty(case.x.numel(), dtype=case.dtype, device=case.x.device)
        symm_mem.rendezvous(x, group)
        ops = torch.ops.symm_mem
        calls = {
            "symm_mem one_shot": lambda: ops.one_shot_all_reduce(x, case.op, group),
            "symm_mem two_shot": lambda: ops.two_shot_all_reduce_(x, case.op, group),
        }
        for call in calls.values():
            call()
    except (ImportError, AttributeError, RuntimeError, TypeError):
        return []
    return [Contender(system, call, x) for system, call in calls.items()]


def check(case: Case, contender: Contender, clock: Clock) -> int:
    case.fill(contender.x)
    out = contender.call()
    clock.synchronize()
    if case.kind == "all_reduce":
        return case.num_wrong(out if isinstance(out, torch.Tensor) else contender.x, contender.codec)
    return case.num_wrong(case.share if case.kind == "reduce_scatter" else case.x, contender.codec)


def measure(case: Case, contender: Contender, clock: Clock, as_graph: bool) -> Line:
    num_wrong = check(case, contender, clock)
    size = case.x.numel() * case.dtype.itemsize
    num_calls = max(1, min(50, BYTES_PER_ROUND // size))

    def calls() -> None:
        for _ in range(num_calls):
            contender.call()

    run = captured(calls).replay if as_graph else calls
    every = of_all_ranks(clock.time([Step(contender.system, run, repeats=num_calls)])[:, 0])
    time = every.median(dim=1).values.max().item()
    algbw = size / time / 1e9
    return Line(
        kind=case.kind,
        size=size,
        count=case.x.numel(),
        dtype=str(case.dtype).removeprefix("torch."),
        op=case.op if case.kind != "all_gather" else "none",
        system=contender.system,
        time_us=time * 1e6,
        algbw=algbw,
        busbw=algbw * case.bus_factor(),
        num_wrong=num_wrong,
        min_us=every.min().item() * 1e6,
        avg_us=every.mean().item() * 1e6,
        max_us=every.max().item() * 1e6,
    )
