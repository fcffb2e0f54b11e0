"""The naive reference: Python loops over tokens and choices, rows moved by all_to_all_single. Slow, and easy to read."""

import torch
import torch.distributed as dist


def custom_kernel(data):
    cfg, rank_data, rank, world_size = data
    num_local = cfg.num_experts // world_size
    x, indices = rank_data.x, rank_data.indices.tolist()

    # Routes: for each rank, the (token, choice) pairs whose expert it owns.
    routes = [[] for _ in range(world_size)]
    for token, experts in enumerate(indices):
        for choice, expert in enumerate(experts):
            routes[expert // num_local].append((token, choice))

    send_counts = torch.tensor([len(pairs) for pairs in routes], device=x.device)
    recv_counts = torch.empty_like(send_counts)
    dist.all_to_all_single(recv_counts, send_counts)
    send_splits, recv_splits = send_counts.tolist(), recv_counts.tolist()
    sent = x.new_empty(sum(send_splits), cfg.hidden_dim)
    experts_of_sent = torch.empty(sum(send_splits), dtype=torch.int64, device=x.device)
    for row, (token, choice) in enumerate(pair for pairs in routes for pair in pairs):
        sent[row] = x[token]
        experts_of_sent[row] = indices[token][choice]

    received = x.new_empty(sum(recv_splits), cfg.hidden_dim)
    experts = experts_of_sent.new_empty(sum(recv_splits))
    dist.all_to_all_single(received, sent, recv_splits, send_splits)
    dist.all_to_all_single(experts, experts_of_sent, recv_splits, send_splits)
    y = torch.empty_like(received)
    for row, expert in enumerate(experts.tolist()):
        y[row] = run_expert(received[row], expert - rank * num_local, rank_data, rank)

    returned = torch.empty_like(sent)
    dist.all_to_all_single(returned, y, send_splits, recv_splits)
    out = torch.zeros(rank_data.num_tokens, cfg.hidden_dim, dtype=torch.float32, device=x.device)
    for row, (token, choice) in enumerate(pair for pairs in routes for pair in pairs):
        out[token] += rank_data.weights[token, choice] * returned[row].float()
    return out.to(cfg.out_dtype)


def run_expert(row, local_expert, rank_data, rank):
    scales = getattr(rank_data, "expert_scales", None)  # only in all2all_experts
    return row * (1 + rank) if scales is None else row * scales[local_expert]
