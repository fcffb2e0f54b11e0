"""Batches for TwoLevelExpertParallel: sums of their values are exact."""

import torch
from node_groups import integers

T, K, H = 40, 3, 144


def sizes(world, **how):
    return {
        "num_experts": 4 * world.size(),
        "num_topk": K,
        "hidden": H,
        "num_max_tokens_per_rank": T,
        "timeout": 20,
    } | how


def batch(generator, num_tokens, num_experts, dtype=torch.float32):
    """(x, topk_idx, topk_weights): small integers, some choices dropped."""
    x = integers(generator, (num_tokens, H), dtype)
    topk_idx = torch.rand(num_tokens, num_experts, generator=generator).topk(K).indices
    topk_idx[torch.rand(num_tokens, K, generator=generator) < 0.1] = -1
    return (
        x,
        topk_idx.to(x.device),
        torch.randint(1, 4, (num_tokens, K), generator=generator).to(x.device, torch.float32),
    )


def scaled_rows(handle, first_expert):
    """What experts that multiply by 1 + id % 5 return."""
    rows = handle.recv_x[handle.expert_row_index[: handle.num_routes].long()]
    counts = handle.expert_counts.long()
    factors = 1 + (first_expert + torch.arange(len(counts), device=rows.device)) % 5
    return rows * factors.repeat_interleave(counts)[:, None].to(rows.dtype)
