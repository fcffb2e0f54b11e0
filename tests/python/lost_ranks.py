"""Ranks that end or freeze at a chosen point of a construction or a call, and what the others report."""

import os
import signal
import time
from pathlib import Path

import on_device
import pytest
import ranks
import torch

import moe_a2a

TIMEOUT = 1.5
VICTIM = 1
CONFIG = {
    "num_experts": 12, "num_topk": 3, "hidden": 32, "num_max_tokens_per_rank": 16,
    "dtype": torch.float32, "timeout": TIMEOUT,
}  # fmt: skip
SHARED_MEMORY = Path("/dev/shm")
# How batches of up to this many tokens travel: with signals, or as LL words.
WAYS = pytest.mark.parametrize("num_max_ll_tokens", [0, 16], ids=["signals", "ll_words"])


def shared_memory_of(pids):
    """Names that shared objects of these processes still have."""
    return [path.name for path in SHARED_MEMORY.glob("moe_a2a.*") if any(f".{pid}." in path.name for pid in pids)]


def inputs(ep, num_tokens=10):
    generator = torch.Generator().manual_seed(ep.rank)
    x = torch.randn(num_tokens, CONFIG["hidden"], generator=generator)
    topk_idx = torch.randint(0, CONFIG["num_experts"], (num_tokens, 3), generator=generator)
    return [tensor.to(ep.device) for tensor in (x, topk_idx, torch.rand(num_tokens, 3, generator=generator))]


def one_call(ep, stop_after=None, kill_signal=signal.SIGKILL):
    """dispatch and combine through the halves; the process ends after the step `stop_after`."""

    def stop(point):
        if point == stop_after:
            os.kill(os.getpid(), kill_signal)

    stop("nothing")
    handle = ep.dispatch_send(*inputs(ep))
    stop("dispatch_send")
    ep.dispatch_recv(handle)
    stop("dispatch_recv")
    y = torch.ones(len(handle.expert_row_index), ep.hidden, device=ep.device)
    ep.combine_send(y, handle)
    stop("combine_send")
    ep.combine_recv(handle)
    on_device.settle(ep)
    stop("combine_recv")


def error_of_survivor(ep, calls=50):
    """Calls until one raises; returns its error, and how long that call took."""
    for _ in range(calls):
        start = time.monotonic()
        try:
            one_call(ep)
        except moe_a2a.PeerTimeoutError as error:
            elapsed = time.monotonic() - start
            later = time.monotonic()
            with pytest.raises(RuntimeError):
                one_call(ep)  # the object is unusable, and raises at once
            assert time.monotonic() - later < ranks.slack(0.5)
            return {
                "rank": error.rank,
                "peer": error.peer,
                "operation": error.operation,
                "phase": error.phase,
                "text": str(error),
                "elapsed": elapsed,
            }
    raise AssertionError(f"no error in {calls} calls")


def gather_pids(group):
    return moe_a2a.as_group(group).all_gather(os.getpid())


def stop_at(point, kill_signal):
    """The process ends when its construction reaches this point."""

    def stop(*_):
        os.kill(os.getpid(), kill_signal)

    if point == "before":
        stop()
    names = {"allocated": "get_comm_handle", "said": "set_comm_handles"}
    if point in names:
        setattr(moe_a2a.ExpertParallel, names[point], stop)
    if point == "mapped":
        connect = moe_a2a.ExpertParallel.set_comm_handles

        def connect_and_stop(ep, handles):
            connect(ep, handles)
            stop()

        moe_a2a.ExpertParallel.set_comm_handles = connect_and_stop
