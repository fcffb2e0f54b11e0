"""Random batches, and what their dispatch and combine give by DeepEP's contracts, computed in one process."""

import torch

SEED = 20261123
HIDDEN, TOPK, EXPERTS_PER_RANK = 256, 3, 4


def batches(num_ranks, call, most=40, dtype=torch.float32):
    """(x, topk_idx, topk_weights) of every rank. Values are small integers: sums of them are exact."""
    generator = torch.Generator().manual_seed(SEED + 100 * num_ranks + call)
    num_experts, result = num_ranks * EXPERTS_PER_RANK, []
    for rank in range(num_ranks):
        num_tokens = int(torch.randint(0, most + 1, (), generator=generator)) if rank != call % num_ranks else most
        num_tokens = 0 if call == 2 and rank == 0 else num_tokens
        ids = torch.stack([torch.randperm(num_experts, generator=generator)[:TOPK] for _ in range(num_tokens + 1)])
        ids = ids[:num_tokens].masked_fill(torch.rand(num_tokens, TOPK, generator=generator) < 0.2, -1)
        x = torch.randint(-8, 9, (num_tokens, HIDDEN), generator=generator).to(dtype)
        result.append((x, ids, torch.randint(1, 5, (num_tokens, TOPK), generator=generator).float()))
    return result


def received(everything, rank):
    """(x, local ids, weights) of the rows that a rank should get."""
    x, ids, weights = (torch.cat(parts) for parts in zip(*everything, strict=True))
    local = ids - rank * EXPERTS_PER_RANK
    mine = (ids >= 0) & (local >= 0) & (local < EXPERTS_PER_RANK)
    rows = mine.any(1)
    return x[rows], torch.where(mine, local, -1)[rows], torch.where(mine, weights, 0.0)[rows]


def by_route(everything, rank, alignment):
    """(rows, weights) of the routes to a rank's experts, with zeros up to the alignment, and their number for each expert."""
    rows, weights, counts = [], [], []
    for expert in range(rank * EXPERTS_PER_RANK, (rank + 1) * EXPERTS_PER_RANK):
        routes = [((ids == expert).nonzero(as_tuple=True), x, w) for x, ids, w in everything]
        x = torch.cat([x[token] for (token, _), x, _ in routes])
        counts.append(len(x))
        padding = -len(x) % alignment
        rows += [x, x.new_zeros(padding, HIDDEN)]
        weights += [w[token, k] for (token, k), _, w in routes] + [torch.zeros(padding)]
    return torch.cat(rows), torch.cat(weights), counts


def factor(expert):
    return 1.0 + expert % 3


def experts(rank, recv_x, recv_topk_idx, recv_topk_weights):
    """Weights and sums the outputs of a row's local experts: each multiplies by its factor."""
    factors = factor(recv_topk_idx + rank * EXPERTS_PER_RANK)
    return recv_x * (recv_topk_weights * factors).masked_fill(recv_topk_idx < 0, 0).sum(1, keepdim=True).to(
        recv_x.dtype
    )


def combined(x, ids, weights):
    return x * (weights * factor(ids)).masked_fill(ids < 0, 0).sum(1, keepdim=True).to(x.dtype)


def on(device, *tensors):
    return [tensor.to(device) for tensor in tensors]
