"""combine(wire=...): sums that travel in a line codec. test_dispatch_combine.py compares their bits with the NumPy model, on
random configurations with any mixture of codecs; here are the promises of the docstring, the errors and the layers."""

import contextlib
import math

import on_device
import pytest
import torch

import moe_a2a
from moe_a2a import codecs

pytestmark = on_device.TESTS

TOKENS, HIDDEN = 40, 200  # the last block of a row is not full


def make_ep(group, dtype=torch.bfloat16, **config):
    config = {"num_max_ll_tokens": 0, "timeout": 20, **config}
    return moe_a2a.ExpertParallel(
        group, num_experts=2 * group.num_ranks, num_topk=group.num_ranks, hidden=HIDDEN,
        num_max_tokens_per_rank=TOKENS, dtype=dtype, **config,
    )  # fmt: skip


def dispatch_to_all(ep):
    """Every token to one expert of every rank. The presummed y that the tests pass is then one row per token."""
    x = torch.zeros(TOKENS, HIDDEN, dtype=ep.dtype, device=ep.device)
    return ep.dispatch(x, (2 * torch.arange(ep.num_ranks, device=ep.device)).repeat(TOKENS, 1))


def sums_of(rank, num_ranks, seed, dtype):
    """What `rank` sends: [R, T, H], a row for every token of every rank. Block sizes differ by powers of two."""
    generator = torch.Generator().manual_seed(seed + rank)
    shape = (num_ranks, TOKENS, math.ceil(HIDDEN / 32))
    size = torch.exp2(torch.randint(-8, 8, shape, generator=generator).float()).repeat_interleave(32, dim=2)
    return (torch.randn(num_ranks, TOKENS, HIDDEN, generator=generator) * size[..., :HIDDEN]).to(dtype)


def largest_in_block(rows):
    padded = torch.nn.functional.pad(rows.double().abs(), (0, -rows.shape[-1] % 32))
    return padded.unflatten(-1, (-1, 32)).amax(-1).repeat_interleave(32, dim=-1)[..., : rows.shape[-1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_errors_stay_within_the_bound(num_ranks, dtype, session_seed):
    def program(group):
        with make_ep(group, dtype) as ep:
            sums = [sums_of(rank, num_ranks, session_seed, dtype) for rank in range(num_ranks)]
            exact = sum(s[ep.rank].double() for s in sums)
            remote = sum(largest_in_block(s[ep.rank]) for rank, s in enumerate(sums) if rank != ep.rank)
            y = sums[ep.rank].reshape(-1, HIDDEN).to(ep.device)
            errors = {}
            for wire in (None, *codecs.CODECS):
                out = ep.combine(y, dispatch_to_all(ep), presummed=True, wire=wire).cpu().double()
                rounding = torch.finfo(dtype).eps * (exact.abs() + remote)
                bound = rounding if wire is None else codecs.ONE_ROUNDING[wire] * remote * (1 + 1e-6) + rounding
                assert ((out - exact).abs() <= bound).all(), wire
                errors[wire] = (out - exact).abs().mean().item()
            assert errors["q8"] < errors["q6"] < errors["q4"]  # each has travelled in its codec

    on_device.run(num_ranks, program)


def test_own_sums_are_exact_and_one_bad_value_spoils_its_block_only():
    def program(group):
        with make_ep(group) as ep:
            for wire in codecs.CODECS:
                sums = torch.ones(ep.num_ranks, TOKENS, HIDDEN, dtype=torch.bfloat16, device=ep.device)
                sums[:, 0, 33] = float("inf") if ep.rank == 1 else 1.0
                sums[:, 1] = 2.0**100  # float16 would overflow
                sums[ep.rank, 2] = 1 + 2**-7  # only this rank's own sum: bits that no codec keeps
                sums[1 - ep.rank, 2] = 0
                out = ep.combine(sums.flatten(0, 1), dispatch_to_all(ep), presummed=True, wire=wire).cpu()
                nan = torch.zeros(HIDDEN, dtype=torch.bool)
                nan[32:64] = ep.rank == 0
                assert torch.equal(out[0].isnan(), nan)
                assert out[0, 33].item() == float("inf") or ep.rank == 0  # rank 1 has its own sum
                assert (out[1].float() / 2.0**101 - 1).abs().max() <= 2**-4
                assert (out[2] == 1 + 2**-7).all()

    on_device.run(2, program)


def test_small_batches_are_not_coded():
    def program(group):
        with make_ep(group, num_max_ll_tokens=TOKENS) as ep:
            y = sums_of(ep.rank, 2, 7, torch.bfloat16).flatten(0, 1).to(ep.device)
            results = [ep.combine(y, dispatch_to_all(ep), presummed=True, wire=wire) for wire in (None, "q4")]
            assert torch.equal(*results)

    on_device.run(2, program)


def test_a_refused_wire_can_be_corrected():
    def program(group):
        with make_ep(group) as ep:
            y = sums_of(ep.rank, 2, 8, torch.bfloat16).flatten(0, 1).to(ep.device)
            expected = ep.combine(y, dispatch_to_all(ep), presummed=True, wire="q6")
            handle = dispatch_to_all(ep)
            if ep.rank == 1:
                with pytest.raises(
                    ValueError, match='wire=.q3. is unknown on rank 1; pass one of "fp8", "q8", "q6", "q4"'
                ):
                    ep.combine(y, handle, presummed=True, wire="q3")
                with pytest.raises(TypeError, match="wire=8 is a int"):
                    ep.combine(y, handle, presummed=True, wire=8)
            for _ in range(3):  # rank 0 is refused at most twice
                with contextlib.suppress(moe_a2a.PeerRefusedError):
                    combined = ep.combine(y, handle, presummed=True, wire="q6")
                    break
            assert torch.equal(combined, expected)

    if on_device.IS_GPU:
        pytest.skip("on a GPU a refusal surfaces after the call; test_refusals.py covers its retries")
    on_device.run(2, program)


def layer_program(group):
    generator = torch.Generator().manual_seed(3)
    num_experts, inner = 2 * group.num_ranks, 64
    w_gate_up = torch.randn(num_experts, 2 * inner, HIDDEN, generator=generator) / HIDDEN**0.5
    w_down = torch.randn(num_experts, HIDDEN, inner, generator=generator) / inner**0.5
    with make_ep(group) as ep:
        mine = slice(ep.rank * ep.num_local_experts, (ep.rank + 1) * ep.num_local_experts)
        weights = [w[mine].to(ep.device, ep.dtype) for w in (w_gate_up, w_down)]
        x = torch.randn(TOKENS, HIDDEN, generator=generator).to(ep.device, ep.dtype)
        topk_idx = (
            torch.rand(TOKENS, num_experts, generator=generator).argsort(1)[:, : ep.num_topk].contiguous().to(ep.device)
        )
        routing = (topk_idx, torch.rand(TOKENS, ep.num_topk, generator=generator).to(ep.device))
        outputs = {}
        for wire in (None, "q8", "q4"):
            layer = moe_a2a.MoELayer(ep, *weights, wire=wire)
            outputs[wire] = layer(x, *routing)
            assert torch.equal(outputs[wire], ep.experts(ep.dispatch(x, *routing), *weights, wire=wire))
        errors = [(outputs[wire] - outputs[None]).float().abs().mean().item() for wire in ("q8", "q4")]
        assert 0 < errors[0] < errors[1] < 0.1 * outputs[None].float().abs().mean().item(), errors
        with pytest.raises(ValueError, match='wire="q8" with fused_combine=True on rank'):
            moe_a2a.MoELayer(ep, *weights, wire="q8", fused_combine=True)


def test_layers_pass_the_wire_on():
    on_device.run(2, layer_program)


def traced_program(group):
    with make_ep(group) as ep:
        y = torch.ones(2 * TOKENS, HIDDEN, dtype=ep.dtype, device=ep.device)
        sizes = {}
        for wire in (None, "q4"):
            with moe_a2a.trace(ep) as trace:
                ep.combine(y, dispatch_to_all(ep), presummed=True, wire=wire)
            timeline = trace.timeline
            kernel = timeline.enclosing_kernels()
            in_combine = timeline.named("combine", "combine_send")[kernel] & (kernel >= 0)
            sums = timeline.slices[timeline.named("sum", "send") & in_combine & (timeline.slices["rank"] == 0)]
            sizes[wire] = {peer: set(sums["bytes"][sums["peer"] == peer].tolist()) for peer in range(2)}
        return sizes


def test_traces_know_the_size_of_coded_sums():
    sizes = on_device.run(2, traced_program)[0]
    plain, line = 2 * HIDDEN, codecs.line_bytes("q4", HIDDEN)
    assert line == 7 * 18
    assert sizes[None][1] == {plain} and sizes["q4"][1] == {line}
    assert sizes["q4"][0] <= {plain}  # a rank's own; on a GPU they stay where they are
