"""Groups of the torch.distributed backend on the session's device, and each collective as a function of the group."""

from datetime import timedelta

import on_device
import ranks
import torch
import torch.distributed as dist

from moe_a2a.rank_processes import RankProcesses
from moe_a2a.torch_backend import OPS, MoeA2aProcessGroup

DEVICE = on_device.NAME
TIMEOUT = timedelta(seconds=20)
REDUCE_OPS = {name: dist.ReduceOp(kind) for kind, name in OPS.items()}


def new_group(members=None, **how) -> MoeA2aProcessGroup:
    group = dist.new_group(members, backend="moe_a2a", **{"timeout": TIMEOUT, **how})
    assert isinstance(group, MoeA2aProcessGroup)
    return group


def run_processes(num_ranks: int, program, *args, **how):
    """In new processes: a pool's default group may have more ranks."""
    on_device.needs_own_gpus(num_ranks)
    return ranks.run_processes(num_ranks, program, *args, **how)


def run_on_backend(num_ranks: int, program, *args):
    """Runs program(report, *args) with a default group of the backend."""
    on_device.needs_own_gpus(num_ranks)
    with RankProcesses(
        num_ranks, timeout=60, method="forkserver", backend="moe_a2a", prepare=ranks.take_device
    ) as processes:
        return processes.run(program, *args, timeout=100)


def integers(shape, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Small enough that sums of a few of them are exact in every dtype."""
    return torch.randint(-30, 30, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def poison(x: torch.Tensor, shape=None) -> torch.Tensor:
    return x.new_full(x.shape if shape is None else shape, float("nan"))


def full(count: int, value: float) -> torch.Tensor:
    return torch.full((count,), float(value), device=DEVICE)


def settle() -> None:
    """On a GPU a call returns before its kernels have run."""
    if on_device.IS_GPU:
        torch.cuda.synchronize()


# Each returns what this rank receives from a group; the inputs are the same for every group.


def all_reduce(group, op, x):
    y = x.clone()
    dist.all_reduce(y, op, group=group)
    return y


def all_reduce_coalesced(group, op, x):
    parts = [x.clone(), 2 * x]
    with dist._coalescing_manager(group):
        for part in parts:
            dist.all_reduce(part, op, group=group)
    return torch.stack(parts)


def reduce_scatter_tensor(group, op, x):
    out = poison(x)
    dist.reduce_scatter_tensor(out, torch.cat([x + r for r in range(group.size())]), op, group=group)
    return out


def reduce_scatter(group, op, x):
    out = poison(x)
    dist.reduce_scatter(out, [x + r for r in range(group.size())], op, group=group)
    return out


def all_gather_into_tensor(group, op, x):
    out = poison(x, (group.size() * x.shape[0], *x.shape[1:]))
    dist.all_gather_into_tensor(out, x, group=group)
    return out


def all_gather(group, op, x):
    parts = [poison(x) for _ in range(group.size())]
    dist.all_gather(parts, x, group=group)
    return torch.stack(parts)


def all_gather_coalesced(group, op, x):
    outs = [poison(x, (group.size(), x.numel())) for _ in range(2)]
    with dist._coalescing_manager(group):
        for index, out in enumerate(outs):
            dist.all_gather_into_tensor(out, (x + index).view(1, -1), group=group)
    return torch.stack(outs)


COLLECTIVES = [
    all_reduce,
    all_reduce_coalesced,
    reduce_scatter_tensor,
    reduce_scatter,
    all_gather_into_tensor,
    all_gather,
    all_gather_coalesced,
]
