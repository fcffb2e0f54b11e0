"""Small calls whose result every rank can compute: each knows the inputs of all ranks, and experts double their rows."""

import torch

from moe_a2a import reference

CONFIG = {
    "num_experts": 12, "num_topk": 2, "hidden": 16, "num_max_tokens_per_rank": 6,
    "dtype": torch.float32, "timeout": 10,
}  # fmt: skip


def make_inputs(ep, salt=0, num_tokens=5):
    return [tensor.to(ep.device) for tensor in inputs_of_rank(ep, ep.rank, salt, num_tokens)]


def inputs_of_rank(ep, rank, salt, num_tokens=5):
    generator = torch.Generator().manual_seed(100 * salt + rank)
    x = torch.randn(num_tokens, ep.hidden, generator=generator)
    topk_idx = torch.randint(-1, ep.num_experts, (num_tokens, ep.num_topk), generator=generator)
    return x, topk_idx, torch.rand(num_tokens, ep.num_topk, generator=generator)


def all_inputs(ep, salt=0):
    per_rank = [inputs_of_rank(ep, rank, salt) for rank in range(ep.num_ranks)]
    return [list(column) for column in zip(*per_rank, strict=True)]


def expected_output(ep, salt=0):
    """For experts that double their rows."""
    handles = reference.dispatch(
        *all_inputs(ep, salt),
        num_experts=ep.num_experts, num_max_tokens_per_rank=ep.num_max_tokens_per_rank,
    )  # fmt: skip
    y = [2 * h.recv_x[h.expert_row_index.clamp(min=0).long()] for h in handles]
    return reference.combine(y, handles)[ep.rank].to(ep.device)


def experts(handle):
    num_routes = int(handle.expert_offsets[-1])
    y = handle.recv_x.new_full((len(handle.expert_row_index), handle.recv_x.shape[1]), torch.nan)
    y[:num_routes] = 2 * handle.recv_x[handle.expert_row_index[:num_routes].long()]
    return y


def good_call(ep, salt=99):
    handle = ep.dispatch(*make_inputs(ep, salt))
    assert torch.equal(ep.combine(experts(handle), handle), expected_output(ep, salt))
