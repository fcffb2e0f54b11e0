"""An MoE layer over the ranks of torchrun, one GPU each (or all on the CPU if there is none).

torchrun --nproc-per-node 4 examples/one_rank_per_gpu.py
"""

import torch
import torch.distributed as dist

import moe_a2a

NUM_EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 64, 6, 2048, 512
MAX_TOKENS, NUM_STEPS = 256, 3

dist.init_process_group()
with moe_a2a.ExpertParallel(
    None, num_experts=NUM_EXPERTS, num_topk=TOP_K, hidden=HIDDEN, num_max_tokens_per_rank=MAX_TOKENS
) as ep:
    generator = torch.Generator(ep.device).manual_seed(ep.rank)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=ep.device, generator=generator)

    w_gate_up = random(ep.num_local_experts, 2 * INTERMEDIATE, HIDDEN) / HIDDEN**0.5
    w_down = random(ep.num_local_experts, HIDDEN, INTERMEDIATE) / INTERMEDIATE**0.5
    layer = moe_a2a.MoELayer(ep, w_gate_up, w_down)

    for _ in range(NUM_STEPS):
        # Ranks may have different numbers of tokens, even none.
        num_tokens = int(torch.randint(MAX_TOKENS + 1, (), generator=torch.Generator().manual_seed(ep.rank)))
        hidden_states = random(num_tokens, HIDDEN)
        scores = random(num_tokens, NUM_EXPERTS).float().softmax(dim=-1)
        topk_weights, topk_idx = scores.topk(TOP_K)
        out = layer(hidden_states, topk_idx, topk_weights)
        assert out.shape == hidden_states.shape and bool(out.isfinite().all())
    print(f"rank {ep.rank} on {ep.device}: {num_tokens} tokens, {ep.num_local_experts} experts", flush=True)
dist.destroy_process_group()
