"""The kernel of combine's backward pass: from the gradients of the sums, those of each route's output and weight."""

import on_device
import pytest
import torch

import moe_a2a

pytestmark = on_device.TESTS

MAX_TOKENS = 9
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-5, torch.bfloat16: 1e-5}  # of fp32 sums; products are exact


def run(group, hidden, dtype, layout, seed):
    sizes = {"num_experts": 4 * group.num_ranks, "num_topk": 3, "num_max_tokens_per_rank": MAX_TOKENS}
    with moe_a2a.ExpertParallel(group, hidden=hidden, dtype=dtype, timeout=20, **sizes) as ep:
        for repeat in range(4):
            generator = torch.Generator().manual_seed(seed + 100 * repeat + ep.rank)
            num_tokens = int(torch.randint(0, MAX_TOKENS + 1, (1,), generator=generator))
            grad_out = torch.randn(num_tokens, hidden, generator=generator).to(dtype)
            topk_idx = torch.rand(num_tokens, ep.num_experts, generator=generator).topk(ep.num_topk).indices
            topk_idx = topk_idx.masked_fill(torch.rand(topk_idx.shape, generator=generator) < 0.2, -1)
            handle = ep.dispatch(grad_out.to(ep.device), topk_idx.to(ep.device), **layout)
            end = handle.num_routes
            num_rows = min(end + 5, handle.capacity)
            wide = torch.randn(num_rows, 2 * hidden, generator=generator).to(dtype)
            y = wide[:, :hidden] if repeat % 2 else wide[:, :hidden].contiguous()  # rows with gaps between, or none
            weights = torch.rand(num_rows, generator=generator)
            grad_y, grad_weights = handle._core.weighted_grads(y.to(ep.device), weights.to(ep.device), handle._handle)
            index = handle.expert_row_index[:num_rows].long().cpu()
            is_route = (index >= 0) & (torch.arange(num_rows) < end)
            rows = handle.recv_x.cpu()[index.clamp(min=0, max=len(handle.recv_x) - 1)].float()
            rows = torch.where(is_route[:, None], rows, 0)
            assert torch.equal(grad_y.cpu(), (rows * weights[:, None]).to(dtype)), repeat
            dots = (rows.double() * y.double()).sum(1)
            bound = TOLERANCE[dtype] * (rows.double() * y.double()).abs().sum(1)
            assert ((grad_weights.cpu().double() - dots).abs() <= bound).all(), repeat
            handle.release()
        ep.check()


# 48: whole vectors; 1040: several per thread; 51: rows that do not allow vectors
@pytest.mark.parametrize(
    "layout", [{}, {"layout": "expert_major", "expert_alignment": 4}], ids=["rows", "expert_major"]
)
@pytest.mark.parametrize(
    "hidden, dtype", [(48, torch.float16), (1040, torch.bfloat16), (51, torch.bfloat16), (20, torch.float32)]
)
def test_gradients_of_outputs_and_weights(hidden, dtype, layout, session_seed):
    on_device.run(2, run, hidden, dtype, layout, session_seed)


def run_refused(group):
    sizes = {"num_experts": group.num_ranks, "num_topk": 1, "num_max_tokens_per_rank": 2, "hidden": 16}
    with moe_a2a.ExpertParallel(group, dtype=torch.float16, timeout=20, **sizes) as ep:
        x = torch.ones(2, 16, dtype=torch.float16, device=ep.device)
        handle = ep.dispatch(x, torch.zeros(2, 1, dtype=torch.int64, device=ep.device))
        y, weights = torch.ones(4, 16, dtype=torch.float16, device=ep.device), torch.ones(4, device=ep.device)
        for bad, words in ((y[:, :8], r"y has shape \[4, 8\]"), (y.float(), "y has dtype torch.float32")):
            with pytest.raises((ValueError, TypeError), match=words):
                handle._core.weighted_grads(bad, weights, handle._handle)
        with pytest.raises(ValueError, match=rf"weights has shape \[3\], expected \[4\] on rank {ep.rank}"):
            handle._core.weighted_grads(y, weights[:3], handle._handle)
        handle.release()


def test_tensors_that_do_not_fit():
    on_device.run(2, run_refused)
