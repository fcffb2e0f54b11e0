"""`python -m moe_a2a doctor`: shows what is installed and what can run here, and runs a self-test."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import moe_a2a
from moe_a2a import _core, installation
from moe_a2a.devices import target_of

HELP = "show what is installed and built in, and run a short self test"

OPTIONAL_PACKAGES = {
    "transformers": "moe_a2a.integrations.transformers, demo",
    "matplotlib": "plots",
    "tqdm": "progress bars",
}
SHARED_MEMORY = "/dev/shm"  # holds the heaps of ranks that are processes, on the CPU target
NUM_RANKS = 2
SIZES: dict[str, Any] = {"num_experts": 8, "num_topk": 2, "hidden": 1024, "num_max_tokens_per_rank": 64}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(options: argparse.Namespace) -> int:
    for name, value in (*_software(), *_hardware()):
        print(f"{name:<14} {value}")
    healthy = True
    for devices in _devices_to_test():
        line = f"{'self test':<14} ranks on {', '.join(map(str, devices))}:"
        try:
            print(f"{line} ok, {_self_test(devices):.2f} ms per dispatch and combine")
        except Exception as error:
            print(f"{line} FAILED: {type(error).__name__}: {error}")
            healthy = False
    return 0 if healthy else 1


def _software() -> Iterator[tuple[str, str]]:
    yield "moe_a2a", _version("moe_a2a")
    yield "targets", f"{', '.join(map(_with_architectures, _core.built_targets()))} (built in)"
    yield "python", f"{platform.python_version()}, {platform.platform()}"
    gpu_side = torch.version.hip and f"HIP {torch.version.hip}"
    gpu_side = gpu_side or (torch.version.cuda and f"CUDA {torch.version.cuda}") or "CPU only"
    yield "torch", f"{torch.__version__} ({gpu_side})"
    for package, purpose in OPTIONAL_PACKAGES.items():
        yield package, f"{_version(package)} (optional: {purpose})"


def _with_architectures(target: str) -> str:
    architectures = installation.architectures(target)
    return f"{target} for {' '.join(architectures)}" if architectures else target


def _hardware() -> Iterator[tuple[str, str]]:
    yield "CPU cores", str(os.cpu_count())
    if os.path.isdir(SHARED_MEMORY):
        space = shutil.disk_usage(SHARED_MEMORY)
        line = f"{space.free / 2**20:.0f} MiB free of {space.total / 2**20:.0f}"
        is_small = space.total < 2**30
        yield SHARED_MEMORY, line + is_small * " (small; start a container with docker run --shm-size=8g)"
    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        yield "GPUs", "none that torch can use"
    for gpu in range(num_gpus):
        peers = [
            str(other) for other in range(num_gpus) if other != gpu and torch.cuda.can_device_access_peer(gpu, other)
        ]
        name = torch.cuda.get_device_name(gpu)
        yield f"GPU {gpu}", f"{name}, reaches GPUs: {' '.join(peers) or 'none'}"


def _version(package: str) -> str:
    return installation.version(package) or "not installed"


def _devices_to_test() -> Iterator[list[torch.device]]:
    """One device per rank."""
    built = _core.built_targets()
    if "cpu" in built:
        yield [torch.device("cpu")] * NUM_RANKS
    if torch.cuda.is_available() and target_of(torch.device("cuda")) in built:
        # One rank per GPU: on a shared GPU, kernels may wait for each other in its queues.
        yield [torch.device("cuda", gpu) for gpu in range(min(NUM_RANKS, torch.cuda.device_count()))]


def _self_test(devices: list[torch.device]) -> float:
    """Runs ranks as threads and checks the result against the reference; returns milliseconds per step."""
    num_ranks = len(devices)
    groups = moe_a2a.thread_group(num_ranks)
    inputs = [_inputs(rank) for rank in range(num_ranks)]

    def rank_main(rank: int) -> tuple[torch.Tensor, float]:
        on_device = [tensor.to(devices[rank]) for tensor in inputs[rank]]
        with moe_a2a.ExpertParallel(
            groups[rank], **SIZES, dtype=torch.float32, device=devices[rank], timeout=10.0
        ) as ep:
            out = _step(ep, *on_device)  # the first step warms up
            start = time.perf_counter()
            for _ in range(10):
                out = _step(ep, *on_device)
            return out.cpu(), 1e3 * (time.perf_counter() - start) / 10

    with ThreadPoolExecutor(num_ranks) as pool:
        outs, milliseconds = zip(*pool.map(rank_main, range(num_ranks)), strict=True)
    for out, expected in zip(outs, _expected(inputs), strict=True):
        if not torch.equal(out, expected):
            raise ArithmeticError("the result differs from the reference")
    return max(milliseconds)


def _inputs(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    num_tokens = 50 + rank
    scores = torch.rand(num_tokens, SIZES["num_experts"], generator=generator)
    return (
        torch.randn(num_tokens, SIZES["hidden"], generator=generator),
        scores.topk(SIZES["num_topk"]).indices,
        torch.rand(num_tokens, SIZES["num_topk"], generator=generator),
    )


def _step(ep: moe_a2a.ExpertParallel, *inputs: torch.Tensor) -> torch.Tensor:
    """A layer whose experts return their input."""
    handle = ep.dispatch(*inputs)
    rows = handle.expert_row_index[: handle.num_routes]
    return ep.combine(handle.recv_x.index_select(0, rows), handle)


def _expected(inputs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    handles = moe_a2a.reference.dispatch(
        *map(list, zip(*inputs, strict=True)),
        num_experts=SIZES["num_experts"],
        num_max_tokens_per_rank=SIZES["num_max_tokens_per_rank"],
    )
    y = [handle.recv_x[handle.expert_row_index.clamp(min=0).long()] for handle in handles]
    return moe_a2a.reference.combine(y, handles)
