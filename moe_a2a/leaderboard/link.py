"""The rate of the link between the ranks, measured by a bare kernel that pushes rows into the other ranks' memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

import moe_a2a
from moe_a2a.commands import bare_push
from moe_a2a.leaderboard.device import RankDevice

HIDDEN = 8192
NUM_TOKENS = {"cuda": 4096, "cpu": 128}  # 64 and 2 MiB to each other rank
NUM_PUSHES = 10


def bytes_per_second(device: RankDevice) -> float:
    """Bytes per second that a rank sends while all send to all others, in the best way and with the best number of blocks.
    Called by every rank of the default group, which has at least two."""
    kind, rank, num_ranks = device.device.type, dist.get_rank(), dist.get_world_size()
    num_tokens = NUM_TOKENS[kind]
    if device.is_gpu:
        torch.cuda.set_device(device.device)
    with moe_a2a.ExpertParallel(
        None,
        num_experts=num_ranks,
        num_topk=1,
        hidden=HIDDEN,
        num_max_tokens_per_rank=num_tokens,
        dtype=torch.float16,
        num_buffers=1,
        device=device.device,
    ) as ep:
        peers = torch.tensor([1 << other for other in range(num_ranks) if other != rank], dtype=torch.int64)
        tokens = torch.arange(num_tokens)
        pushes = torch.stack([peers.repeat(num_tokens), tokens.repeat_interleave(len(peers))], dim=1).to(device.device)
        rows = torch.zeros(len(pushes), HIDDEN, dtype=torch.float16, device=device.device)
        core = ep._open_core()
        ways = bare_push.ways(device.device)
        fastest = min(_seconds(device, partial(core.push_rows, rows, pushes, *way)) for way in ways)
        dist.barrier()  # nobody closes while another still pushes
    return rows.nbytes / fastest


def _seconds(device: RankDevice, push: Callable[[], None]) -> float:
    """Time of one push, on the slowest rank."""
    push()
    device.synchronize()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(NUM_PUSHES):
        push()
    device.synchronize()
    slowest = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item() / NUM_PUSHES
