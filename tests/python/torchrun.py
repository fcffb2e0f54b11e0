"""Runs programs that are written for torchrun."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Set
from pathlib import Path

import on_device
import pickled_programs
import torch
import torch.distributed as dist

from moe_a2a.rank_processes import RankProcesses

SECONDS = 180


def environment_of_a_user() -> dict[str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if on_device.IS_GPU:
        del environment["MOE_A2A_DEVICE"]  # the rank finds its GPU
    return environment


def run(program: Path, num_ranks: int) -> str:
    """Returns what the ranks say."""
    how = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks))
    result = subprocess.run(
        [sys.executable, *how, program.name], cwd=program.parent, env=environment_of_a_user(),
        capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def run_forked(program: Path, num_ranks: int, num_nodes: int = 1, mortal: Set[int] = frozenset()) -> None:
    """Without torchrun, with its environment: torchrun and every rank would import PyTorch again. The ranks say what they say on
    this process's output; those in `mortal` may die."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    per_node = num_ranks // num_nodes
    environment = {
        "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(per_node), "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    own = [({"RANK": str(rank), "LOCAL_RANK": str(rank % per_node)},) for rank in range(num_ranks)]
    with RankProcesses(
        num_ranks, timeout=SECONDS, method="forkserver", backend=None, dumps=pickled_programs.to_bytes
    ) as ranks:
        ranks.run(_rank_main, str(program), environment, own=own, timeout=SECONDS, mortal=mortal)


def _rank_main(report: object, program: str, environment: dict[str, str], of_rank: dict[str, str]) -> None:
    os.environ |= environment | of_rank
    torch.set_num_threads(1)
    os.chdir(Path(program).parent)
    sys.argv = [program]
    runpy.run_path(program, run_name="__main__")
