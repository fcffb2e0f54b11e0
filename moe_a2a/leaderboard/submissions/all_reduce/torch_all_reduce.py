"""torch.distributed.all_reduce: NCCL, or gloo on the CPU."""

import torch.distributed as dist


def custom_kernel(data):
    x, rank, world_size = data
    out = x.clone()
    dist.all_reduce(out)
    return out
