"""moe_a2a.Collectives.all_reduce with 8 bits per value on the wire. Its memory belongs to the process group: made on the first
call of a group, given back when the group is destroyed."""

import torch
import torch.distributed as dist

import moe_a2a

_open = {}  # the Collectives of the current group: at most one


def custom_kernel(data):
    x, rank, world_size = data
    return _collectives(x.nbytes, x.device).all_reduce(x, codec="q8")


def _collectives(nbytes, device):
    key = (dist.group.WORLD, nbytes)
    if key not in _open:
        _close()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        _open[key] = moe_a2a.Collectives(None, max_nbytes=nbytes, device=device)
    return _open[key]


def _close():
    while _open:
        _open.popitem()[1].close()


_destroy_process_group = dist.destroy_process_group


def _close_and_destroy(*args, **kwargs):
    _close()
    _destroy_process_group(*args, **kwargs)


dist.destroy_process_group = _close_and_destroy
