"""Objects that cannot be made on GPUs give their memory back: 65 to 86 GiB were lost after three attempts."""

import on_device
import pytest
import torch

import moe_a2a

pytestmark = [on_device.TESTS, on_device.gpu_only]

CONFIG = {
    "num_experts": 16, "num_topk": 8, "hidden": 7168, "num_max_tokens_per_rank": 8192,
    "dtype": torch.bfloat16, "timeout": 60,
}  # fmt: skip
SLACK = 256 << 20  # what a context and its kernels take


def fail_on_one_rank(group):
    rank = group.rank
    with moe_a2a.ExpertParallel(group, **{**CONFIG, "num_max_tokens_per_rank": 8}) as ep:  # loads the kernels
        ep.check()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    taken = torch.empty(free - (1 << 30), dtype=torch.uint8, device="cuda") if rank == 1 else None
    before, _ = torch.cuda.mem_get_info()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="rank 1.*num_max_tokens_per_rank"):
            moe_a2a.ExpertParallel(group, **CONFIG)
    after, _ = torch.cuda.mem_get_info()
    del taken
    torch.cuda.empty_cache()
    assert before - after < SLACK, f"rank {rank}: {(before - after) >> 20} MiB lost"
    with moe_a2a.ExpertParallel(group, **CONFIG) as ep:
        ep.check()


def test_a_rank_without_memory_costs_the_others_none():
    on_device.run(2, fail_on_one_rank, timeout=120)


def disagree(group):
    torch.cuda.empty_cache()
    before, _ = torch.cuda.mem_get_info()
    for _ in range(3):
        with pytest.raises(ValueError, match="hidden"):
            moe_a2a.ExpertParallel(group, **{**CONFIG, "hidden": 7168 if group.rank else 4096})
    after, _ = torch.cuda.mem_get_info()
    assert before - after < SLACK, f"rank {group.rank}: {(before - after) >> 20} MiB lost"


def test_ranks_that_disagree_lose_no_memory():
    on_device.run(2, disagree, timeout=120)
