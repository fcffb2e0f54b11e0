"""`python -m moe_a2a bench data_parallel`: training steps of DDP and FSDP2, and the calls that they make, on the backend "moe_a2a"
of torch.distributed and on NCCL (CPU: gloo)."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from moe_a2a.bench.clock import Clock, Measuring, Step
from moe_a2a.bench.options import add_how, add_outputs
from moe_a2a.bench.report import Report, compare
from moe_a2a.bench.start import start_ranks, this_ranks_device
from moe_a2a.bench.statistics import medians_us, p99
from moe_a2a.bench.together import FailedSomewhereError, together
from moe_a2a.commands.baselines import all_gather_single, reduce_scatter_single
from moe_a2a.commands.command_line import integer, integers
from moe_a2a.commands.rank_options import device_type_of

OURS = "moe_a2a"
SLEEP_CYCLES = 1_000_000  # about 0.5 ms
NUM_CHECKED = 4  # steps whose losses are compared
TOLERANCE = 1e-3  # of a loss, relative
HEADER = f"{'what':<24} {'KiB':>9} {'backend':<8} {'us':>10} {'p99':>10} {'host':>8} {'of the peer':>11}"
Run = Callable[[], Any]


@dataclass(frozen=True)
class Line:
    """One call or training step on one backend. Medians of the slowest rank: on the device, and until the call returns on an idle
    device (CPU: the same). nbytes: of the tensor, all ranks' parts together, or of the model's weights."""

    what: str
    nbytes: int
    ranks: int
    backend: str
    us: float
    p99_us: float
    host_us: float
    of_peer: float  # us / the peer's

    def __str__(self) -> str:
        return (
            f"{self.what:<24} {self.nbytes / 1024:9.0f} {self.backend:<8} {self.us:10.1f} {self.p99_us:10.1f} {self.host_us:8.1f} "
            f"{self.of_peer:11.2f}"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is measured")
    what.add_argument("--sizes", type=integers(1), metavar="65536,...",
                      help="bytes of the tensors of calls (default: 64 KiB to 128 MiB)")  # fmt: skip
    what.add_argument("--hidden", type=integers(1), metavar="1024,...",
                      help="width of the models, blocks of two matrices (default: 1024,4096; on the CPU 64)")  # fmt: skip
    what.add_argument("--layers", type=integer(1), default=8, help="blocks per model (default: 8)")
    what.add_argument("--tokens", type=integer(1), default=4096, help="rows of a step, per rank (default: 4096)")
    add_how(parser)
    add_outputs(parser, "data_parallel")


def run(options: argparse.Namespace) -> int:
    on_cpu = device_type_of(options) == "cpu"
    options.sizes = options.sizes or [64 << 10, 1 << 20, 4 << 20, 16 << 20, 128 << 20][: 2 if on_cpu else None]
    options.hidden = options.hidden or ([64] if on_cpu else [1024, 4096])
    return start_ranks(options, rank_main, "bench")


def rank_main(options: argparse.Namespace) -> int:
    device = this_ranks_device(options)
    clock = Clock(device, Measuring.of(options), SLEEP_CYCLES)
    report = Report(device, options, HEADER)
    peer = "nccl" if device.type == "cuda" else "gloo"
    groups = {peer: dist.new_group(backend=peer), OURS: dist.new_group(backend=OURS)}
    for nbytes in options.sizes:
        for what, of_group in CALLS.items():
            _compare(what, nbytes, groups, partial(of_group, nbytes, device), clock, report)
        report.write()
    for hidden in options.hidden:
        for what, wrap in WRAPS.items():
            steps = partial(TrainingStep, hidden, options, device, wrap)
            _compare(f"{what}, hidden {hidden}", 16 * options.layers * hidden**2, groups, steps, clock, report)
            report.write()
    report.print_left_out()
    clock.synchronize()
    dist.destroy_process_group(groups[OURS])
    return 1 if report.failed else 0


def _compare(
    what: str, nbytes: int, groups: dict[str, Any], make: Callable[[Any], Any], clock: Clock, report: Report
) -> None:
    """One line per backend whose results are the peer's. make(group) returns a callable, whose checked() returns its results."""
    runs: dict[str, Run] = {}
    expected = None
    for backend, group in groups.items():
        try:
            made = together(partial(make, group))
            found = together(made.checked)
            expected = found if expected is None else expected
            together(partial(compare, f"{what} beside the peer's", found, expected, TOLERANCE))
        except FailedSomewhereError as error:
            report.leave_out(backend, f"{what}, {nbytes} bytes", str(error))
        else:
            runs[backend] = made
    if not runs:
        return
    steps = [Step(backend, made) for backend, made in runs.items()]
    times = clock.time(steps, lead_in=steps[:1])
    host = torch.tensor([clock.host_time(steps, clock.how.iterations)], dtype=torch.float64)
    medians, hosts = medians_us(times), medians_us(host)
    for backend, seconds, us, host_us in zip(runs, times.T, medians, hosts, strict=True):
        report.add(Line(what, nbytes, dist.get_world_size(), backend, us, 1e6 * p99(seconds), host_us, us / medians[0]))


# ---- calls


class Call:
    """A call of torch.distributed on bfloat16 tensors of `nbytes`, all ranks' parts together."""

    def __init__(self, make: Callable[[Any, Tensor, Tensor], Any], nbytes: int, device: torch.device, group: Any):
        num_ranks = dist.get_world_size()
        part = max(1, nbytes // 2 // num_ranks)
        self._whole = torch.empty(part * num_ranks, dtype=torch.bfloat16, device=device)
        self._part = torch.empty(part, dtype=torch.bfloat16, device=device)
        self._call = partial(make, group, self._whole, self._part)

    def __call__(self) -> None:
        self._call()

    def checked(self) -> Tensor:
        self._whole.copy_(torch.arange(len(self._whole)) % 61 + dist.get_rank())
        self._part.copy_(torch.arange(len(self._part)) % 59 + dist.get_rank())
        self._call()
        return torch.cat([self._whole, self._part])


def _all_reduce(group: Any, whole: Tensor, part: Tensor) -> None:
    dist.all_reduce(whole, group=group)


def _all_reduce_async(group: Any, whole: Tensor, part: Tensor) -> None:
    dist.all_reduce(whole, group=group, async_op=True).wait()


def _all_gather(group: Any, whole: Tensor, part: Tensor) -> None:
    all_gather_single(whole, part, group=group)


def _reduce_scatter(group: Any, whole: Tensor, part: Tensor) -> None:
    reduce_scatter_single(part, whole, group=group)


CALLS = {
    "all_reduce": partial(Call, _all_reduce),
    "all_reduce, async_op": partial(Call, _all_reduce_async),
    "all_gather_into_tensor": partial(Call, _all_gather),
    "reduce_scatter_tensor": partial(Call, _reduce_scatter),
}


# ---- training


class Block(torch.nn.Module):
    def __init__(self, hidden: int, **how: Any):
        super().__init__()
        self.norm = torch.nn.LayerNorm(hidden, **how)
        self.up = torch.nn.Linear(hidden, 4 * hidden, bias=False, **how)
        self.down = torch.nn.Linear(4 * hidden, hidden, bias=False, **how)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def _ddp(model: torch.nn.Sequential, group: Any, device: torch.device) -> torch.nn.Module:
    return DistributedDataParallel(model, process_group=group)


def _fsdp2(model: torch.nn.Sequential, group: Any, device: torch.device) -> torch.nn.Module:
    from torch.distributed.fsdp import fully_shard  # takes half a second, which other commands need not wait for

    mesh = DeviceMesh.from_group(group, device.type)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


WRAPS = {"DDP": _ddp, "FSDP2": _fsdp2}


class TrainingStep:
    """Forward, backward and SGD on a stack of blocks in bfloat16, each rank with rows of its own."""

    def __init__(
        self, hidden: int, options: argparse.Namespace, device: torch.device, wrap: Callable[..., Any], group: Any
    ):
        torch.manual_seed(options.seed)
        how: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        self._model = wrap(torch.nn.Sequential(*[Block(hidden, **how) for _ in range(options.layers)]), group, device)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        generator = torch.Generator(device).manual_seed(options.seed + dist.get_rank())
        self._x = torch.randn(options.tokens, hidden, generator=generator, **how)

    def __call__(self) -> Tensor:
        self._optimizer.zero_grad()
        loss = self._model(self._x).float().square().mean()
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def checked(self) -> Tensor:
        return torch.stack([self() for _ in range(NUM_CHECKED)])
