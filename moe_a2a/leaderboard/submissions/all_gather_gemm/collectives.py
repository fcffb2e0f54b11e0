"""moe_a2a.Collectives.all_gather, then PyTorch's product. Its memory lives as long as the process group."""

import torch.distributed as dist
import torch.nn.functional as F

import moe_a2a


def custom_kernel(data):
    x, weight, bias = data
    coll = moe_a2a.of_group(moe_a2a.Collectives, max_nbytes=x.nbytes * dist.get_world_size(), device=x.device)
    whole = coll.all_gather(x)
    return F.linear(whole, weight, bias)


def traced():
    """For `leaderboard rank`: the object whose kernels to trace."""
    return moe_a2a.group_objects.opened(moe_a2a.Collectives)
