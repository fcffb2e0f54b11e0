"""A submission with a well-known race: readers reset flags and counts, and nothing holds writers back.

With a barrier between calls it is right. Without one, a rank that has sent a peer nothing does not wait for that peer: it may
write the count of its next call before the peer has read the count of this one.
"""

import tempfile
import time

import numpy as np
import torch
import torch.distributed as dist

SECONDS = 20.0
_boxes = {}


def custom_kernel(data):
    cfg, rank_data, rank, world_size = data
    flags, counts, rows = _boxes_of(cfg, world_size)
    owners = (rank_data.indices // (cfg.num_experts // world_size)).numpy()
    sent = [np.argwhere(owners == peer) for peer in range(world_size)]
    for peer, routes in enumerate(sent):
        rows[0, peer, rank, : len(routes)] = rank_data.x.numpy()[routes[:, 0]]
        counts[peer, rank] = len(routes)
        flags[0, peer, rank] = 1
    for peer in range(world_size):
        _take(flags, 0, rank, peer)
        if count := counts[rank, peer]:
            rows[1, peer, rank, :count] = rows[0, rank, peer, :count] * np.float16(1 + rank)
            flags[1, peer, rank] = 1
    out = torch.zeros(rank_data.num_tokens, cfg.hidden_dim)
    for peer, routes in enumerate(sent):
        if len(routes):
            _take(flags, 1, rank, peer)
            returned = torch.from_numpy(rows[1, rank, peer, : len(routes)].astype(np.float32))
            weights = rank_data.weights[routes[:, 0], routes[:, 1], None]
            out.index_add_(0, torch.from_numpy(routes[:, 0].copy()), returned * weights)
    return out.half()


def _take(flags, step, rank, peer):
    end = time.monotonic() + SECONDS
    while flags[step, rank, peer] == 0:
        if time.monotonic() > end:
            raise TimeoutError(f"nothing came from {peer}")
        time.sleep(0)
    flags[step, rank, peer] = 0  # reset for the next call: the race


def _boxes_of(cfg, world_size):
    if dist.group.WORLD not in _boxes:
        path = [tempfile.mkstemp(dir="/dev/shm")[1] if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(path)
        most = cfg.max_num_tokens * cfg.experts_per_token
        shapes = [(2, world_size, world_size), (world_size,) * 2, (2, world_size, world_size, most, cfg.hidden_dim)]
        sizes = [int(np.prod(shape)) for shape in shapes]
        if dist.get_rank() == 0:
            with open(path[0], "wb") as file:
                file.truncate(8 * sizes[0] + 8 * sizes[1] + 2 * sizes[2])
        dist.barrier()
        offsets, types = [0, 8 * sizes[0], 8 * (sizes[0] + sizes[1])], [np.int64, np.int64, np.float16]
        _boxes.clear()
        _boxes[dist.group.WORLD] = [
            np.memmap(path[0], dtype, "r+", offset, shape)
            for dtype, offset, shape in zip(types, offsets, shapes, strict=True)
        ]
        dist.barrier()
        if dist.get_rank() == 0:
            __import__("os").unlink(path[0])
    return _boxes[dist.group.WORLD]
