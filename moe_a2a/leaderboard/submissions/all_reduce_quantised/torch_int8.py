"""Blocks of 32 values as int8 with one scale each, gathered and added in fp32 on every rank. Only PyTorch."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

BLOCK = 32


def custom_kernel(data):
    x, rank, world_size = data
    blocks = F.pad(x.float(), (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True) / 127
    values = torch.where(scales > 0, blocks / scales, 0).round().to(torch.int8)
    all_values = [torch.empty_like(values) for _ in range(world_size)]
    all_scales = [torch.empty_like(scales) for _ in range(world_size)]
    dist.all_gather(all_values, values)
    dist.all_gather(all_scales, scales)
    total = sum(v.float() * s for v, s in zip(all_values, all_scales, strict=True))
    return total.view(-1)[: x.numel()].to(x.dtype)
