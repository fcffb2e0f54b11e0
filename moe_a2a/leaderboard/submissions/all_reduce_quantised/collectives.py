"""moe_a2a.Collectives.all_reduce with 8 bits per value on the wire. Its memory lives as long as the process group."""

import moe_a2a


def custom_kernel(data):
    x, rank, world_size = data
    return moe_a2a.of_group(moe_a2a.Collectives, max_nbytes=x.nbytes, device=x.device).all_reduce(x, codec="q8")


def traced():
    """For `leaderboard rank`: the object whose kernels to trace."""
    return moe_a2a.group_objects.opened(moe_a2a.Collectives)
