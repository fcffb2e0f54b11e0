"""PyTorch's product, then moe_a2a.Collectives.reduce_scatter. Its memory lives as long as the process group."""

import torch.nn.functional as F

import moe_a2a


def custom_kernel(data):
    x, weight, bias = data
    whole = F.linear(x, weight, bias)
    return moe_a2a.of_group(moe_a2a.Collectives, max_nbytes=whole.nbytes, device=x.device).reduce_scatter(whole)


def traced():
    """For `leaderboard rank`: the object whose kernels to trace."""
    return moe_a2a.group_objects.opened(moe_a2a.Collectives)
