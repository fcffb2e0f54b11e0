"""A rank is killed in the middle of the calls of four; the others go on with the experts that are left.

    python examples/dead_rank.py

The ranks meet in a store that this launcher hosts, so it outlives each of them. (torchrun's store does too, but torchrun ends
all ranks when one dies.)
"""

import multiprocessing
import os
import signal

import torch
import torch.distributed as dist

import moe_a2a

NUM_RANKS, NUM_EXPERTS, TOP_K, HIDDEN, NUM_TOKENS = 4, 16, 2, 256, 32
VICTIM, FATAL_STEP, NUM_STEPS = 2, 10, 30
TIMEOUT = 3.0  # seconds until a missing rank is an error; longer than any step


def batch(rank: int, step: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(step * NUM_RANKS + rank)
    x = torch.randn(NUM_TOKENS, HIDDEN, device=device, generator=generator)
    scores = torch.rand(NUM_TOKENS, NUM_EXPERTS, device=device, generator=generator)
    return x, scores.topk(TOP_K).indices


def moe_layer(ep: moe_a2a.ExpertParallel, x: torch.Tensor, topk_idx: torch.Tensor, dies: bool) -> None:
    """The experts return their input, so a token's sum is its row times the number of its experts that are left."""
    if ep.expert_map is not None:
        topk_idx = ep.expert_map[topk_idx]
    handle = ep.dispatch(x, topk_idx)
    y = handle.recv_x[handle.expert_row_index[: handle.num_routes]]
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    out = ep.combine(y, handle)
    ep.check()  # on a GPU the kernels report a missing rank here
    assert torch.equal(out, x * (topk_idx >= 0).sum(1, keepdim=True)), "wrong sums"


def rank_main(rank: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    ep = moe_a2a.ExpertParallel(
        None,
        num_experts=NUM_EXPERTS,
        num_topk=TOP_K,
        hidden=HIDDEN,
        num_max_tokens_per_rank=NUM_TOKENS,
        dtype=torch.float32,
        device=f"cuda:{rank}" if torch.cuda.device_count() >= NUM_RANKS else "cpu",
        timeout=TIMEOUT,
    )
    step = 0
    while step < NUM_STEPS:
        try:
            moe_layer(ep, *batch(rank, step, ep.device), dies=rank == VICTIM and step == FATAL_STEP)
            step += 1
        except moe_a2a.PeerTimeoutError as error:
            ep = moe_a2a.shrink(ep, lost=[error.peer])
            # A rank that needed no sum from the dead one has ended that step, and failed in the next.
            step = min(ep.group.all_gather(step))
    assert ep.expert_map is not None
    lost_experts = (ep.expert_map[:-1] < 0).nonzero().flatten().tolist()
    print(f"rank {rank}: now rank {ep.rank} of {ep.num_ranks}, lost ranks {ep.group.lost}, experts {lost_experts}")
    ep.close()


if __name__ == "__main__":
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=rank_main, args=(rank, host.port)) for rank in range(NUM_RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    ends = [process.exitcode for process in ranks]
    assert ends == [-signal.SIGKILL if rank == VICTIM else 0 for rank in range(NUM_RANKS)], ends
