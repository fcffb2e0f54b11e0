"""PyTorch's product, then torch.distributed's reduce-scatter."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

# torch 2.13 renamed it and warns about the old name.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def custom_kernel(data):
    x, weight, bias = data
    whole = F.linear(x, weight, bias)
    out = torch.empty(whole.shape[0] // dist.get_world_size(), whole.shape[1], dtype=whole.dtype, device=whole.device)
    reduce_scatter(out, whole)
    return out
