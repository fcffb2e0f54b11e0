"""experts.simulated_experts(): scaled rows, weighted and summed by one kernel, for a presummed combine; and the whole layer."""

import on_device
import pytest
import torch

import moe_a2a
from moe_a2a.experts import simulated_experts, simulated_layer

pytestmark = on_device.TESTS

MAX_TOKENS = 9
LAYOUTS = [{}, {"layout": "expert_major", "expert_alignment": 4}, {"layout": "masked"}]


def make_ep(group, hidden, dtype, **config):
    config = {"num_experts": 5 * group.num_ranks, "num_topk": 3, "timeout": 20} | config
    return moe_a2a.ExpertParallel(group, hidden=hidden, num_max_tokens_per_rank=MAX_TOKENS, dtype=dtype, **config)


def draw(ep, seed):
    """x, topk_idx and topk_weights: up to MAX_TOKENS tokens with distinct experts, a fifth of the choices dropped."""
    generator = torch.Generator().manual_seed(seed + ep.rank)
    num_tokens = int(torch.randint(0, MAX_TOKENS + 1, (1,), generator=generator))
    x = torch.randn(num_tokens, ep.hidden, generator=generator).to(ep.dtype)
    topk_idx = torch.rand(num_tokens, ep.num_experts, generator=generator).topk(ep.num_topk).indices
    topk_idx = topk_idx.masked_fill(torch.rand(topk_idx.shape, generator=generator) < 0.2, -1)
    return x, topk_idx, torch.rand(num_tokens, ep.num_topk, generator=generator)


def expected(ep, x, topk_idx, topk_weights, factors):
    """factors: [E, H], or [E, 1], of all ranks. Each rank's sum is rounded to the dtype, then the ranks' sums are added."""
    total = torch.zeros(x.shape, dtype=torch.float32)
    for rank in range(ep.num_ranks):
        part = torch.zeros_like(total)
        for k in range(ep.num_topk):
            is_here = topk_idx[:, k] // ep.num_local_experts == rank  # -1 // n is -1
            y = (x.float() * factors[topk_idx[:, k].clamp(min=0)].float()).to(ep.dtype).float()
            part += torch.where(is_here[:, None], topk_weights[:, k, None] * y, 0)
        total += part.to(ep.dtype).float()
    return total.to(ep.dtype)


def run_scales(group, hidden, dtype, layout, seed):
    with make_ep(group, hidden, dtype) as ep:
        for repeat in range(4):
            generator = torch.Generator().manual_seed(seed + 100 * repeat)
            per_column = (0.5 + torch.rand(ep.num_experts, hidden, generator=generator)).to(dtype)
            per_rank = 1 + torch.arange(ep.num_experts) // ep.num_local_experts
            mine = slice(ep.rank * ep.num_local_experts, (ep.rank + 1) * ep.num_local_experts)
            cases = [
                (per_column[mine].to(ep.device), per_column),
                (per_column[mine, 0].contiguous().to(ep.device), per_column[:, :1]),
                (1 + ep.rank, per_rank[:, None]),
            ]
            for scales, factors in cases:
                tokens = draw(ep, seed + 1000 * repeat)
                handle = ep.dispatch(*(t.to(ep.device) for t in tokens), **layout)
                sums = simulated_experts(handle, scales)
                assert sums.shape == (ep.num_ranks * MAX_TOKENS, hidden) and sums.dtype == dtype
                out = ep.combine(sums, handle, presummed=True)
                assert torch.equal(out.cpu(), expected(ep, *tokens, factors)), (repeat, tuple(factors.shape))
        ep.check()


# 48: whole vectors; 1040: several pieces, the last one short; 51: rows that do not allow vectors
@pytest.mark.parametrize("layout", LAYOUTS, ids=["rows", "expert_major", "masked"])
@pytest.mark.parametrize(
    "hidden, dtype", [(48, torch.float16), (1040, torch.bfloat16), (51, torch.float16), (20, torch.float32)]
)
def test_weighted_sums_of_scaled_rows(hidden, dtype, layout, session_seed):
    on_device.run(2, run_scales, hidden, dtype, layout, session_seed)


def run_unwritten(group):
    """Rows of tokens that were not sent here, and of nonexistent tokens, are not written."""
    with make_ep(group, 16, torch.float32, num_topk=1) as ep:
        x = torch.ones(2, 16, device=ep.device)
        topk_idx = torch.zeros(2, 1, dtype=torch.int32, device=ep.device)  # on rank 0, all of them
        handle = ep.dispatch(x, topk_idx, torch.full((2, 1), 2.0, device=ep.device))
        sums = simulated_experts(handle, 3.0)
        assert (sums[handle.recv_rows.long()] == 6).all()
        assert len(handle.recv_rows) == (4 if ep.rank == 0 else 0)
        assert (ep.combine(sums, handle, presummed=True) == 6).all()


def test_one_rank_has_no_rows():
    on_device.run(2, run_unwritten)


def run_bad(group):
    with make_ep(group, 16, torch.float16) as ep:
        ones = torch.ones(2, 16, dtype=torch.float16, device=ep.device)
        handle = ep.dispatch(ones, torch.zeros(2, 3, dtype=torch.int64, device=ep.device))
        num_local, where = ep.num_local_experts, rf"rank {ep.rank}"

        def some(*shape, dtype=torch.float16):
            return torch.ones(*shape, dtype=dtype, device=ep.device)

        for scales, error, words in (
            (some(num_local + 1), ValueError, rf"scales has shape \[{num_local + 1}\], expected \[{num_local}\]"),
            (some(num_local, 15), ValueError, rf"expected \[{num_local}, 16\]"),
            (some(num_local, dtype=torch.float64), TypeError, "scales"),
            (some(num_local, dtype=torch.float32), TypeError, "scales has dtype torch.float32, expected float16"),
            (some(num_local, 32)[:, ::2], ValueError, "scales is not contiguous"),
        ):
            with pytest.raises(error, match=words) as raised:
                simulated_experts(handle, scales)
            assert where in str(raised.value)
        for scales, words in (
            ("2", "scales='2' is a str"),
            (None, "scales=None is a NoneType"),
            (10**400, "scales=1000.* is a int"),
        ):
            with pytest.raises(TypeError, match=rf"{words} on {where}; pass a number or a tensor"):
                simulated_experts(handle, scales)
        ep.combine(simulated_experts(handle, 2), handle, presummed=True)  # nothing was lost
        with pytest.raises(RuntimeError, match=f"simulated_experts got a handle that is closed on {where}"):
            simulated_experts(handle, 2)


def test_bad_scales():
    on_device.run(2, run_bad)


def run_float8(group):
    with make_ep(group, 128, torch.float16) as ep:
        x = torch.ones(2, 128, dtype=torch.float16, device=ep.device)
        handle = ep.dispatch(x, torch.zeros(2, 3, dtype=torch.int64, device=ep.device), quantize="fp8")
        with pytest.raises(TypeError, match=rf"float8.* on rank {ep.rank}; dispatch without quantize"):
            simulated_experts(handle, 2)
        handle.release()


def test_float8_rows_are_refused():
    on_device.run(2, run_float8)


def run_layer(group, hidden, dtype, seed):
    """One call, beside the three that it stands for; in every other round one rank makes the three."""
    with make_ep(group, hidden, dtype) as ep:
        for repeat in range(6):
            generator = torch.Generator().manual_seed(seed + 100 * repeat)
            factors = (0.5 + torch.rand(ep.num_experts, hidden, generator=generator)).to(dtype)
            scales = factors[ep.rank * ep.num_local_experts :][: ep.num_local_experts].to(ep.device)
            if repeat % 3 == 2:
                scales, factors = 2.5, torch.full((ep.num_experts, 1), 2.5)
            tokens = draw(ep, seed + 1000 * repeat)
            on_rank = [t.to(ep.device) for t in tokens]
            if repeat % 2 and ep.rank == 0:
                handle = ep.dispatch(*on_rank)
                out = ep.combine(simulated_experts(handle, scales), handle, presummed=True)
            else:
                out = simulated_layer(ep, *on_rank, scales)
            assert torch.equal(out.cpu(), expected(ep, *tokens, factors)), repeat
        ep.check()


@pytest.mark.parametrize("hidden, dtype", [(48, torch.float16), (51, torch.bfloat16)])
def test_layer_in_one_call(hidden, dtype, session_seed):
    on_device.run(2, run_layer, hidden, dtype, session_seed)


def run_bad_layer(group):
    """What one rank gets wrong is raised there, and as PeerRefusedError on the other; the next call works."""
    with make_ep(group, 16, torch.float16) as ep:
        x = torch.ones(2, 16, dtype=torch.float16, device=ep.device)
        topk_idx = torch.zeros(2, 3, dtype=torch.int64, device=ep.device)
        own = ep.num_local_experts
        mistakes = (
            ((x.float(), topk_idx, None, 2), TypeError, "x has dtype torch.float32, expected torch.float16"),
            ((x[:, :8], topk_idx, None, 2), ValueError, r"x has shape"),
            ((x, topk_idx[:1], None, 2), ValueError, "topk_idx has shape"),
            ((x, None, None, 2), ValueError, "topk_idx is None"),
            (
                (x, topk_idx, None, torch.ones(own + 1, dtype=torch.float16, device=ep.device)),
                ValueError,
                "scales has shape",
            ),
            ((x, topk_idx, None, "2"), TypeError, "scales='2' is a str on rank 1; pass a number or a tensor"),
            ((x, topk_idx, None, None), TypeError, "scales=None is a NoneType on rank 1"),
        )
        for arguments, error, words in mistakes:
            if ep.rank == 1:
                with pytest.raises(error, match=words):
                    simulated_layer(ep, *arguments)
            else:
                with pytest.raises(moe_a2a.PeerRefusedError, match=words):
                    simulated_layer(ep, x, topk_idx, None, 2)
                    ep.check()
            group.all_gather(None)  # the refusing rank must not go on before the other has observed the refusal
            out = simulated_layer(ep, x, topk_idx, None, 3)
            assert (out == 9).all(), words  # three choices of weight 1
            ep.check()


def test_bad_layer_on_one_rank():
    on_device.run(2, run_bad_layer)
