"""Two alternating micro-batches: while the rows of one are in flight, the experts of the other compute.

    torchrun --nproc-per-node 2 examples/overlap.py

Uses dispatch() and combine() in halves: *_send returns when the rows are posted, *_recv waits for the other ranks' rows.
With num_buffers=2 two dispatches may be open at once. All ranks make the same calls in the same order.
"""

import torch
import torch.distributed as dist

import moe_a2a
from moe_a2a.experts import swiglu_experts

NUM_EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, NUM_TOKENS = 16, 2, 512, 256, 64

dist.init_process_group()
ep = moe_a2a.ExpertParallel(
    None, num_experts=NUM_EXPERTS, num_topk=TOP_K, hidden=HIDDEN, num_max_tokens_per_rank=NUM_TOKENS, num_buffers=2
)
generator = torch.Generator(ep.device).manual_seed(ep.rank)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device=ep.device, generator=generator)


w_gate_up = random(ep.num_local_experts, 2 * INTERMEDIATE, HIDDEN) / HIDDEN**0.5
w_down = random(ep.num_local_experts, HIDDEN, INTERMEDIATE) / INTERMEDIATE**0.5
batches = []
for _ in range(2):
    scores = random(NUM_TOKENS, NUM_EXPERTS).float().softmax(dim=-1)
    topk_weights, topk_idx = scores.topk(TOP_K)
    batches.append((random(NUM_TOKENS, HIDDEN), topk_idx, topk_weights))


def experts(handle: moe_a2a.DispatchHandle) -> torch.Tensor:
    return swiglu_experts(handle, w_gate_up, w_down).to(ep.dtype)


@torch.no_grad()
def one_after_the_other() -> list[torch.Tensor]:
    outs = []
    for batch in batches:
        handle = ep.dispatch(*batch)
        outs.append(ep.combine(experts(handle), handle))
    return outs


@torch.no_grad()
def overlapped() -> list[torch.Tensor]:
    first = ep.dispatch_send(*batches[0])
    second = ep.dispatch_send(*batches[1])  # in flight while the first batch's experts compute
    ep.combine_send(experts(ep.dispatch_recv(first)), first)
    ep.combine_send(experts(ep.dispatch_recv(second)), second)  # while the first batch's sums travel
    return [ep.combine_recv(first), ep.combine_recv(second)]


for expected, out in zip(one_after_the_other(), overlapped(), strict=True):
    assert torch.equal(out, expected)  # the order of addition is fixed, so the bits are the same
print(f"rank {ep.rank}: the same bits, overlapped or not", flush=True)
ep.check()
ep.close()
dist.destroy_process_group()
