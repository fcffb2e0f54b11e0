"""The naive reference: every rank gathers everything and adds it in fp32."""

import torch
import torch.distributed as dist


def custom_kernel(data):
    x, rank, world_size = data
    parts = [torch.empty_like(x) for _ in range(world_size)]
    dist.all_gather(parts, x)
    return torch.stack(parts).float().sum(0).to(x.dtype)
