"""Sort by expert, all_to_all_single, sort again, one matrix product per expert, then the reverse. Only PyTorch."""

import torch
import torch.distributed as dist
import torch.nn.functional as F


def custom_kernel(data):
    cfg, rank_data, rank, world_size = data
    num_local = cfg.num_experts // world_size
    flat_expert = rank_data.indices.reshape(-1).long()
    order = torch.argsort(flat_expert, stable=True)
    src_token = order // cfg.experts_per_token

    send_counts = torch.bincount(flat_expert, minlength=cfg.num_experts).view(world_size, num_local)
    recv_counts = torch.empty_like(send_counts)
    dist.all_to_all_single(recv_counts, send_counts)
    send_splits, recv_splits = torch.stack([send_counts.sum(1), recv_counts.sum(1)]).tolist()

    x = rank_data.x
    received = x.new_empty(sum(recv_splits), cfg.hidden_dim)
    dist.all_to_all_single(received, x[src_token], recv_splits, send_splits)

    # Rows arrive by source rank, then by expert; a product needs its expert's rows together.
    local_expert = torch.arange(num_local, device=x.device).repeat(world_size)
    by_expert = torch.argsort(local_expert.repeat_interleave(recv_counts.view(-1)), stable=True)
    rows, y = received[by_expert], torch.empty_like(received)
    y[by_expert] = run_experts(rows, recv_counts.sum(0).tolist(), rank_data)

    returned = x.new_empty(src_token.numel(), cfg.hidden_dim)
    dist.all_to_all_single(returned, y, send_splits, recv_splits)
    out = torch.zeros(rank_data.num_tokens, cfg.hidden_dim, dtype=torch.float32, device=x.device)
    out.index_add_(0, src_token, returned.float() * rank_data.weights.reshape(-1)[order][:, None])
    return out.to(cfg.out_dtype)


def run_experts(rows, counts, rank_data):
    outputs = []
    for expert, x in enumerate(rows.split(counts)):
        gate, up = F.linear(x, rank_data.w_gate_up[expert]).chunk(2, dim=-1)
        outputs.append(F.linear(F.silu(gate) * up, rank_data.w_down[expert]))
    return torch.cat(outputs)
