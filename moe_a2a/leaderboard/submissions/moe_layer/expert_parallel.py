"""moe_a2a's dispatch, experts and combine: on a GPU the products gather their rows from where dispatch() put them.

The evaluator makes a new process group for each case, and may move a rank to another process. So the memory belongs to the
group: the group's first call allocates it, and destroying the group frees it.
"""

import moe_a2a


def custom_kernel(data):
    cfg, rank_data, rank, world_size = data
    ep = _expert_parallel(cfg, rank_data.x.device)
    handle = ep.dispatch(rank_data.x, rank_data.indices, rank_data.weights)
    return ep.experts(handle, rank_data.w_gate_up, rank_data.w_down)


def traced():
    """For `leaderboard rank`: the objects whose kernels to trace."""
    return moe_a2a.group_objects.opened(moe_a2a.ExpertParallel)


def _expert_parallel(cfg, device):
    return moe_a2a.of_group(
        moe_a2a.ExpertParallel,
        num_experts=cfg.num_experts,
        num_topk=cfg.experts_per_token,
        hidden=cfg.hidden_dim,
        num_max_tokens_per_rank=cfg.max_num_tokens,
        dtype=cfg.in_dtype,
        device=device,
    )
