"""Sort by expert, exchange counts and rows with all_to_all_single, then the reverse. Only PyTorch."""

import torch
import torch.distributed as dist


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
    y = run_experts(received, recv_counts, rank_data, rank)
    returned = x.new_empty(src_token.numel(), cfg.hidden_dim)
    dist.all_to_all_single(returned, y, send_splits, recv_splits)

    out = torch.zeros(rank_data.num_tokens, cfg.hidden_dim, dtype=torch.float32, device=x.device)
    out.index_add_(0, src_token, returned.float() * rank_data.weights.reshape(-1)[order][:, None])
    return out.to(cfg.out_dtype)


def run_experts(received, recv_counts, rank_data, rank):
    scales = getattr(rank_data, "expert_scales", None)  # only in all2all_experts
    if scales is None:
        return received * (1 + rank)
    world_size, num_local = recv_counts.shape  # rows arrive by source rank, then by expert
    experts = torch.arange(num_local, device=received.device).repeat(world_size)
    return received * scales[experts.repeat_interleave(recv_counts.reshape(-1))]
