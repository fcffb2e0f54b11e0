"""The ranks of one machine, split into nodes. The groups between the nodes are gloo's, on GPUs NCCL's."""

from datetime import timedelta

import on_device
import ranks
import torch
import torch.distributed as dist


def run(split, program, *args, **how):
    num_nodes, num_local = split
    on_device.needs_own_gpus(num_nodes * num_local)
    return ranks.run_processes(num_nodes * num_local, program, *split, *args, **how)


def groups(num_nodes: int, num_local: int, timeout: float = 20):
    """This rank's node, and its rail: the ranks in its place on all nodes."""
    rank, limit = dist.get_rank(), timedelta(seconds=timeout)
    between = "nccl" if on_device.IS_GPU else "gloo"
    nodes = [dist.new_group([n * num_local + i for i in range(num_local)], timeout=limit) for n in range(num_nodes)]
    rails = [
        dist.new_group([n * num_local + i for n in range(num_nodes)], timeout=limit, backend=between)
        for i in range(num_local)
    ]
    return nodes[rank // num_local], rails[rank % num_local]


def integers(generator: torch.Generator, shape, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(-20, 21, shape, generator=generator).to(on_device.NAME, dtype)
