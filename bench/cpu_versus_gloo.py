"""dispatch + combine on the CPU against what people use today, in the same run, on the same inputs.

    python bench/cpu_versus_gloo.py [--ranks 4] [--iterations 40] [--json results.json]

Systems: ExpertParallel (rows where they landed; and the expert-major layout, which copies them),
sort + all_to_all_single over gloo, all-gather + reduce-scatter over gloo.
Every system must give the right result first. The systems take turns inside one loop; a step's time
is that of its slowest rank, after a barrier; the table has medians over the steps, and the p99.
The experts are not part of the time: y is ready before dispatch starts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import moe_a2a
from moe_a2a import peers, reference


@dataclass(frozen=True)
class Shape:
    num_tokens: int
    hidden: int
    num_topk: int
    num_experts: int
    dtype: torch.dtype

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.num_tokens}/{self.hidden}/{self.num_topk}/{self.num_experts} {dtype}"


SHAPES = [
    Shape(*sizes, dtype)
    for sizes in ((128, 7168, 8, 256), (1024, 2048, 6, 64))
    for dtype in (torch.float32, torch.bfloat16)
]
OURS = "moe_a2a"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass
class System:
    name: str
    dispatch: Callable[[], Any]
    combine: Callable[[Tensor, Any], Tensor]
    copy_rows: Callable[[Any], Tensor]  # experts that do nothing: y = x
    exact: bool  # bit for bit equal to the reference


def make_inputs(shape: Shape, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + rank)
    x = torch.randn(shape.num_tokens, shape.hidden, generator=generator).to(shape.dtype)
    scores = torch.rand(shape.num_tokens, shape.num_experts, generator=generator)
    weights, topk_idx = scores.topk(shape.num_topk, dim=1)
    return x, topk_idx, weights / weights.sum(dim=1, keepdim=True)


def make_systems(shape: Shape, group: Any, inputs: tuple[Tensor, Tensor, Tensor]) -> list[System]:
    config = {
        "num_experts": shape.num_experts,
        "num_topk": shape.num_topk,
        "hidden": shape.hidden,
        "num_max_tokens_per_rank": shape.num_tokens,
        "dtype": shape.dtype,
    }
    ep = moe_a2a.ExpertParallel(group, **config, device="cpu")

    def gather(handle: Any) -> Tensor:
        y = torch.zeros(len(handle.expert_row_index), shape.hidden, dtype=shape.dtype)
        y[: handle.num_routes] = handle.recv_x[handle.expert_row_index[: handle.num_routes].long()]
        return y

    def expert_major() -> Any:
        handle = ep.dispatch(*inputs, layout="expert_major")
        handle.expert_x  # noqa: B018  (copied when it is first read)
        return handle

    def expert_x(handle: Any) -> Tensor:
        return handle.expert_x.clone()

    systems = [
        System(OURS, lambda: ep.dispatch(*inputs), ep.combine, gather, True),
        System(
            f"{OURS}, expert-major",
            expert_major,
            ep.combine,
            expert_x,
            True,
        ),
    ]
    for name, peer_class in (
        ("sort + all_to_all, gloo", peers.SortAllToAll),
        ("all-gather + reduce-scatter, gloo", peers.AllGatherReduceScatter),
    ):
        peer = peer_class(group, **config)
        systems.append(System(name, lambda p=peer: p.dispatch(*inputs), peer.combine, expert_x, False))
    return systems


def expected_output(shape: Shape, rank: int, num_ranks: int) -> Tensor:
    x, topk_idx, weights = (list(v) for v in zip(*(make_inputs(shape, r) for r in range(num_ranks)), strict=True))
    handles = reference.dispatch(
        x,
        topk_idx,
        weights,
        num_experts=shape.num_experts,
        num_max_tokens_per_rank=shape.num_tokens,
        layout="expert_major",
    )
    return reference.combine([handle.expert_x for handle in handles], handles)[rank]


def check(system: System, expected: Tensor) -> None:
    handle = system.dispatch()
    out = system.combine(system.copy_rows(handle), handle)
    if system.exact:
        if not torch.equal(out, expected):
            raise SystemExit(f"{system.name}: result is not the reference's, no time is worth it")
    else:
        tolerance = TOLERANCE[expected.dtype]
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


def measure(systems: list[System], iterations: int, group: Any) -> dict[str, Tensor]:
    """Seconds [iterations, 2] of dispatch and combine for each system, on this rank."""
    ready_y = {}
    for system in systems:
        handle = system.dispatch()
        ready_y[system.name] = system.copy_rows(handle)
        system.combine(ready_y[system.name], handle)
    times = {system.name: torch.zeros(iterations, 2, dtype=torch.float64) for system in systems}
    for iteration in range(iterations):
        for system in systems:
            dist.barrier(group)
            start = time.perf_counter()
            handle = system.dispatch()
            middle = time.perf_counter()
            system.combine(ready_y[system.name], handle)
            end = time.perf_counter()
            times[system.name][iteration] = torch.tensor([middle - start, end - middle])
    return times


def slowest_rank(times: Tensor, group: Any) -> dict[str, float]:
    """Milliseconds; each step's time is that of the rank that took longest."""
    dispatch, combine = times.unbind(1)
    phases = torch.stack([dispatch, combine, dispatch + combine])
    dist.all_reduce(phases, op=dist.ReduceOp.MAX, group=group)
    dispatch, combine, total = phases * 1e3
    return {
        "dispatch": dispatch.median().item(),
        "combine": combine.median().item(),
        "total": total.median().item(),
        "p99": total.quantile(0.99).item(),
    }


def run_rank(rank: int, num_ranks: int, iterations: int, folder: str) -> None:
    torch.set_num_threads(1)  # the ranks share the cores
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    group = dist.group.WORLD
    rows = []
    for shape in SHAPES:
        systems = make_systems(shape, group, make_inputs(shape, rank))
        expected = expected_output(shape, rank, num_ranks)
        for system in systems:
            check(system, expected)
        times = measure(systems, iterations, group)
        figures = {system.name: slowest_rank(times[system.name], group) for system in systems}
        for name, figure in figures.items():
            ratio = figure["total"] / figures[OURS]["total"]
            rows.append({**asdict(shape), "shape": str(shape), "system": name, **figure, "ratio": ratio})
        if rank == 0:
            print(f"{shape}: all systems correct, {iterations} steps each", flush=True)
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows, default=str))
    dist.barrier(group)
    dist.destroy_process_group()


def print_table(rows: list[dict[str, Any]]) -> None:
    print(f"\n{'tokens/hidden/top-k/experts':31} {'system':34} {'dispatch':>9} {'combine':>9}", end="")
    print(f" {'sum':>9} {'p99':>9}  time / {OURS}   (ms, slowest rank)")
    for row in rows:
        print(
            f"{row['shape']:31} {row['system']:34} {row['dispatch']:9.2f} {row['combine']:9.2f}",
            end="",
        )
        print(f" {row['total']:9.2f} {row['p99']:9.2f}  {row['ratio']:.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    arguments = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    print(f"# {platform.machine()}, {os.cpu_count()} cores, {arguments.ranks} rank processes", end="")
    print(f", python {platform.python_version()}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(
            run_rank,
            args=(arguments.ranks, arguments.iterations, folder),
            nprocs=arguments.ranks,
        )
        rows = json.loads(Path(folder, "rows.json").read_text())
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    print_table(rows)
    sort_ratios = [row["ratio"] for row in rows if row["system"].startswith("sort")]
    print(f"sort + all_to_all takes {min(sort_ratios):.2f}x to {max(sort_ratios):.2f}x our time")


if __name__ == "__main__":
    sys.exit(main())
