"""The naive reference: all ranks gather all tokens, run their own experts on them one by one, and sum. Easy to read."""

import torch
import torch.distributed as dist
import torch.nn.functional as F


def custom_kernel(data):
    cfg, rank_data, rank, world_size = data
    num_local = cfg.num_experts // world_size
    everything = [None] * world_size
    own = (rank_data.x.cpu(), rank_data.indices.cpu(), rank_data.weights.cpu())
    dist.all_gather_object(everything, own)

    device, parts = rank_data.x.device, []
    for x, indices, weights in everything:
        x, indices, weights = x.to(device), indices.to(device), weights.to(device)
        part = torch.zeros(cfg.max_num_tokens, cfg.hidden_dim, dtype=torch.float32, device=device)
        for local_expert in range(num_local):
            token, choice = (indices == rank * num_local + local_expert).nonzero(as_tuple=True)
            gate, up = F.linear(x[token], rank_data.w_gate_up[local_expert]).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, rank_data.w_down[local_expert])
            part.index_add_(0, token, y.float() * weights[token, choice, None])
        parts.append(part)

    total = torch.stack(parts)  # this rank's experts' contributions to all ranks' tokens
    dist.all_reduce(total)
    return total[rank, : rank_data.num_tokens].to(cfg.out_dtype)
