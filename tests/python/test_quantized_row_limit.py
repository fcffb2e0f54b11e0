"""Shared memory limits the length of rows that dispatch quantises; longer rows are refused.

Regression: the limit was half of the shared memory, less 256 bytes. That ignored the block's signal queue, so the longest
accepted rows had no memory to be quantised in.
"""

import re

import on_device
import pytest
import torch

import moe_a2a
from moe_a2a import reference

pytestmark = on_device.TESTS

TOO_LONG = 500_000  # exceeds the shared memory of any GPU


def make(group, num_ranks, hidden):
    return moe_a2a.ExpertParallel(
        group, num_experts=num_ranks, num_topk=1, hidden=hidden, num_max_tokens_per_rank=3, num_max_ll_tokens=0,
        device=on_device.NAME, timeout=5,
    )  # fmt: skip


def dispatch(ep, x):
    idx = torch.arange(len(x), device=x.device)[:, None] % ep.num_experts
    return ep.dispatch(x, idx, torch.ones(idx.shape, device=x.device), quantize="fp8")


def rows(ep, seed):
    generator = torch.Generator(ep.device).manual_seed(seed)
    return torch.randn(3, ep.hidden, generator=generator, device=ep.device).bfloat16()


def refused_hidden(group, num_ranks, hidden):
    with make(group, num_ranks, hidden) as ep:
        with pytest.raises(ValueError) as raised:
            dispatch(ep, rows(ep, 0))
        return int(re.search(r"a row of \d+ bytes > (\d+)", str(raised.value))[1])


def longest_hidden(row_bytes):
    """Values, padded to 16, and a scale of 4 bytes per 128 of them."""
    hidden = row_bytes
    while -(-hidden // 16) * 16 + 4 * -(-hidden // 128) > row_bytes:
        hidden -= 1
    return hidden


def quantise_up_to_the_limit(group, num_ranks):
    limit = refused_hidden(group, num_ranks, TOO_LONG)
    hidden = longest_hidden(limit)
    assert refused_hidden(group, num_ranks, hidden + 1) == limit
    for seed, shorter in enumerate((0, 1, 16, 130, 500)):
        with make(group, num_ranks, hidden - shorter) as ep:
            x = rows(ep, seed)
            handle = dispatch(ep, x)
            expected, scales = reference.quantize_fp8(x, handle.recv_x.dtype)
            for token in range(len(x)):
                if token % ep.num_experts != ep.rank:
                    continue
                row = ep.rank * 3 + token  # the slot of this rank's own token
                assert torch.equal(handle.recv_x[row].view(torch.uint8), expected[token].view(torch.uint8))
                assert torch.equal(handle.recv_x_scales[row], scales[token])
            handle.release()
            ep.check()


@on_device.gpu_only
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_rows_are_quantised_up_to_the_limit_that_the_error_names(num_ranks):
    on_device.run(num_ranks, quantise_up_to_the_limit, num_ranks)
