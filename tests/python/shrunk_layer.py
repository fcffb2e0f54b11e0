"""A layer on an object that has lost ranks, whose result the reference knows; and ranks that die during its calls."""

import os
import random
import signal
import threading

import on_device
import torch

import moe_a2a
from moe_a2a import reference

TIMEOUT = 1.5
NUM_EXPERTS, TOP_K, HIDDEN, MAX_TOKENS = 24, 4, 40, 16
CONFIG = {
    "num_experts": NUM_EXPERTS, "num_topk": TOP_K, "hidden": HIDDEN, "num_max_tokens_per_rank": MAX_TOKENS,
    "dtype": torch.float32, "timeout": TIMEOUT,
}  # fmt: skip


def batch_of(rank, seed):
    """A rank's tokens; a tenth of their choices is dropped."""
    generator = torch.Generator().manual_seed(seed * 64 + rank)
    num_tokens = int(torch.randint(0, MAX_TOKENS + 1, (1,), generator=generator))
    topk_idx = torch.randint(0, NUM_EXPERTS, (num_tokens, TOP_K), generator=generator)
    topk_idx[torch.rand(topk_idx.shape, generator=generator) < 0.1] = -1
    x = torch.randn(num_tokens, HIDDEN, generator=generator)
    return x, topk_idx, torch.rand(num_tokens, TOP_K, generator=generator)


def apply_experts(recv_x, expert_row_index, expert_offsets, first_expert):
    """Expert e of the original object multiplies its rows by e + 1/3."""
    counts = expert_offsets.diff().long()
    experts = torch.arange(first_expert, first_expert + len(counts), device=recv_x.device).repeat_interleave(counts)
    y = recv_x.new_full((len(expert_row_index), recv_x.shape[1]), torch.nan)
    rows = expert_row_index[: len(experts)].long()
    y[: len(experts)] = recv_x[rows] * (experts[:, None] + 1 / 3).to(recv_x.dtype)
    return y


def expected_of(rank, seed, num_ranks, lost):
    """In the original group, without the tokens of the ranks that are lost and without choices of their experts."""
    num_local_experts = NUM_EXPERTS // num_ranks
    x, topk_idx, topk_weights = map(list, zip(*(batch_of(r, seed) for r in range(num_ranks)), strict=True))
    for r in range(num_ranks):
        if r in lost:
            x[r], topk_idx[r], topk_weights[r] = x[r][:0], topk_idx[r][:0], topk_weights[r][:0]
        for dead in lost:
            topk_idx[r][topk_idx[r] // num_local_experts == dead] = -1
    handles = reference.dispatch(x, topk_idx, topk_weights, num_experts=NUM_EXPERTS, num_max_tokens_per_rank=MAX_TOKENS)
    y = [
        apply_experts(h.recv_x, h.expert_row_index, h.expert_offsets, r * num_local_experts)
        for r, h in enumerate(handles)
    ]
    return reference.combine(y, handles)[rank]


def original_ranks(ep):
    return getattr(ep.group, "ranks", tuple(range(ep.num_ranks)))


def check_layer(ep, seed, num_ranks):
    rank, lost = original_ranks(ep)[ep.rank], getattr(ep.group, "lost", ())
    x, topk_idx, topk_weights = (tensor.to(ep.device) for tensor in batch_of(rank, seed))
    if ep.expert_map is not None:
        topk_idx = ep.expert_map[topk_idx]
    handle = ep.dispatch(x, topk_idx, topk_weights)
    y = apply_experts(handle.recv_x, handle.expert_row_index, handle.expert_offsets, rank * ep.num_local_experts)
    out = on_device.combine(ep, y, handle)
    assert torch.equal(out.cpu(), expected_of(rank, seed, num_ranks, lost)), (seed, rank, lost)


def lose(ep, seed, num_ranks):
    """Calls until a rank is lost; returns the error."""
    for call in range(100_000):
        try:
            check_layer(ep, seed + call % 5, num_ranks)
        except moe_a2a.PeerTimeoutError as error:
            return error
    raise AssertionError("no rank was lost")


def die_during_calls(ep, seed, num_ranks):
    delay = 0.001 * random.Random(seed).randrange(40)
    threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    lose(ep, seed, num_ranks)


def check_map(ep, num_ranks):
    group = ep.group
    lost = [e for e in range(NUM_EXPERTS) if e // (NUM_EXPERTS // num_ranks) in group.lost]
    assert (ep.expert_map[:-1] == -1).nonzero().flatten().tolist() == lost
    kept = ep.expert_map[ep.expert_map >= 0].tolist()
    assert kept == list(range(ep.num_experts)) and ep.expert_map[-1] == -1


def mappings():
    with open("/proc/self/maps") as maps:
        return sum("/dev/shm" in line for line in maps)
