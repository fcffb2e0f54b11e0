"""torch.distributed's all-gather, then PyTorch's product."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

# torch 2.13 renamed it and warns about the old name.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def custom_kernel(data):
    x, weight, bias = data
    whole = torch.empty(x.shape[0] * dist.get_world_size(), x.shape[1], dtype=x.dtype, device=x.device)
    all_gather(whole, x)
    return F.linear(whole, weight, bias)
