"""moe_a2a as a communication backend of flashinfer.moe_ep, against a sum over each token's own choices."""

# ruff: noqa: E402 (what follows importorskip needs flashinfer)

import dataclasses
import inspect
import time
import types

import on_device
import pytest
import ranks
import torch

pytestmark = on_device.TESTS

pytest.importorskip("flashinfer", reason="flashinfer is not a test dependency: pip install flashinfer-python")

from flashinfer.fused_moe.api import QuantFormat
from flashinfer.moe_ep.config import BootstrapConfig
from flashinfer.moe_ep.core.comm import (
    MoEEpCommParams,
    MoEEpCommunication,
    available_communication_backends,
    create_communication,
)

import moe_a2a
import moe_a2a.integrations.flashinfer  # registers the backend
from moe_a2a.devices import default_device, float8_dtype

SEED = 20261124
HIDDEN, TOPK, EXPERTS_PER_RANK, MOST_TOKENS = 256, 3, 4, 40
# What the installed FlashInfer calls it: max_tokens_per_rank in 0.7.2, runtime_max_tokens_per_rank since 0.7.4.
(BOUND,) = (name for name in inspect.signature(MoEEpCommunication.dispatch).parameters if "max_tokens_per_rank" in name)


def parameters(num_ranks, **changes):
    sizes = {"num_experts": num_ranks * EXPERTS_PER_RANK, "top_k": TOPK, "hidden_size": HIDDEN}
    return MoEEpCommParams(**{**sizes, "max_tokens_per_rank": MOST_TOKENS, **changes})


def backend(group, **changes):
    group = moe_a2a.as_group(group)
    bootstrap = BootstrapConfig(world_size=group.num_ranks, rank=group.rank, process_group=group)
    return create_communication(bootstrap, parameters(group.num_ranks, **changes), "moe_a2a", timeout=ranks.slack(10))


def tokens_of(rank, call, num_experts, dtype):
    generator = torch.Generator().manual_seed(SEED + 100 * call + rank)
    num_tokens = int(torch.randint(0, MOST_TOKENS + 1, (), generator=generator)) if call else MOST_TOKENS
    topk_ids = torch.stack([torch.randperm(num_experts, generator=generator)[:TOPK] for _ in range(num_tokens + 1)])
    topk_ids = topk_ids[:num_tokens].masked_fill(torch.rand(num_tokens, TOPK, generator=generator) < 0.2, -1)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype)
    return x, topk_ids, torch.rand(num_tokens, TOPK, generator=generator)


def factor(expert):
    return 1 + expert % 3


def fused_moe(received, first, last, dtype):
    """Evaluates, as the contract demands, only the ids of this rank; every other row becomes NaN."""
    ids, rows = received.topk_ids.long(), received.hidden_states.float()
    if received.hidden_states_scale is not None:
        rows = rows * received.hidden_states_scale.repeat_interleave(128, dim=1)
    local = (ids >= first) & (ids < last)
    weights = torch.ones(ids.shape, device=ids.device) if received.topk_weights is None else received.topk_weights
    sums = rows * (weights * factor(ids)).masked_fill(~local, 0).sum(dim=1, keepdim=True)
    return torch.where(local.any(dim=1, keepdim=True), sums, torch.nan).to(dtype)


def expected(x, topk_ids, topk_weights):
    return x.float() * (topk_weights * factor(topk_ids)).masked_fill(topk_ids < 0, 0).sum(dim=1, keepdim=True)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_pairs_follow_the_contract(num_ranks, dtype, id_dtype, weighted):
    print(f"seed {SEED}")
    num_experts = num_ranks * EXPERTS_PER_RANK

    def program(group):
        comm, device = backend(group, dtype=dtype, invalid_expert_id=num_experts), default_device()
        for call in range(4):
            x, topk_ids, topk_weights = tokens_of(comm.ep_rank, call, num_experts, dtype)
            x, ids = x.to(device), topk_ids.to(device, id_dtype)
            given = topk_weights.to(device) if weighted else None
            most = max(len(tokens_of(rank, call, num_experts, dtype)[0]) for rank in range(num_ranks)) if call else None
            received = comm.dispatch(x, ids, given, **{BOUND: most})
            expected_rows = MOST_TOKENS if most is None else min(1 << (most - 1).bit_length(), MOST_TOKENS)
            assert received.tokens_per_rank == expected_rows
            num_rows = comm.ep_size * received.tokens_per_rank
            assert received.hidden_states.shape == (num_rows, HIDDEN) and received.topk_ids.dtype == torch.int32
            assert received.topk_ids.shape == (num_rows, TOPK) and (received.topk_weights is None) != weighted
            first = comm.ep_rank * EXPERTS_PER_RANK
            others = received.topk_ids[(received.topk_ids < first) | (received.topk_ids >= first + EXPERTS_PER_RANK)]
            assert (others == num_experts).all()
            y = fused_moe(received, first, first + EXPERTS_PER_RANK, dtype)
            output = torch.full_like(x, torch.nan)
            shape = (comm.ep_size, received.tokens_per_rank, HIDDEN) if call % 2 else y.shape
            assert comm.combine(y.reshape(shape), output=output).data_ptr() == output.data_ptr()
            want = expected(x.cpu(), topk_ids, topk_weights if weighted else torch.ones(topk_weights.shape))
            torch.testing.assert_close(output.cpu().float(), want, rtol=0.02, atol=0.05)
        comm.destroy()
        comm.destroy()

    on_device.run(num_ranks, program)


def test_a_step_without_tokens():
    def program(group):
        comm, device = backend(group), default_device()
        x = torch.empty(0, HIDDEN, dtype=torch.bfloat16, device=device)
        received = comm.dispatch(x, torch.empty(0, TOPK, dtype=torch.int32, device=device), **{BOUND: 0})
        assert received.tokens_per_rank == 1 and (received.topk_ids == -1).all()
        assert comm.combine(torch.full_like(received.hidden_states, torch.nan)).shape == x.shape
        comm.destroy()

    on_device.run(2, program)


def test_float8_rows_bring_their_scales():
    print(f"seed {SEED}")

    def program(group):
        comm, device = backend(group, dispatch_format=QuantFormat.DeepSeekFp8), default_device()
        x, topk_ids, topk_weights = tokens_of(comm.ep_rank, 0, 2 * EXPERTS_PER_RANK, torch.float32)
        scales = x.reshape(-1, HIDDEN // 128, 128).abs().amax(dim=2) / 448
        rows = (x.reshape(-1, HIDDEN // 128, 128) / scales[:, :, None]).reshape(x.shape).to(float8_dtype(device))
        sent = [part.to(device) for part in (rows, topk_ids, topk_weights, scales)]
        received = comm.dispatch(*sent[:3], hidden_states_scale=sent[3])
        assert received.hidden_states.dtype == float8_dtype(device)
        first = comm.ep_rank * EXPERTS_PER_RANK
        out = comm.combine(fused_moe(received, first, first + EXPERTS_PER_RANK, torch.bfloat16))
        torch.testing.assert_close(out.cpu().float(), expected(x, topk_ids, topk_weights), rtol=0.1, atol=0.1)
        comm.destroy()

    on_device.run(2, program)


def test_mxfp8_rows_bring_their_scales():
    print(f"seed {SEED}")

    def program(group):
        comm, device = backend(group, dispatch_format=QuantFormat.MXFP8), default_device()
        x, topk_ids, topk_weights = tokens_of(comm.ep_rank, 0, 2 * EXPERTS_PER_RANK, torch.float32)
        exponents = x.reshape(-1, HIDDEN // 32, 32).abs().amax(dim=2).log2().ceil() - 8
        rows = (
            (x.reshape(-1, HIDDEN // 32, 32) / exponents.exp2()[:, :, None]).reshape(x.shape).to(float8_dtype(device))
        )
        sent = [part.to(device) for part in (rows, topk_ids, topk_weights, (exponents + 127).to(torch.uint8))]
        received = comm.dispatch(*sent[:3], hidden_states_scale=sent[3])
        factors = (received.hidden_states_scale.float() - 127).exp2().repeat_interleave(32, dim=1)
        received = dataclasses.replace(
            received, hidden_states=received.hidden_states.float() * factors, hidden_states_scale=None
        )
        first = comm.ep_rank * EXPERTS_PER_RANK
        out = comm.combine(fused_moe(received, first, first + EXPERTS_PER_RANK, torch.bfloat16))
        torch.testing.assert_close(out.cpu().float(), expected(x, topk_ids, topk_weights), rtol=0.1, atol=0.1)
        comm.destroy()

    on_device.run(2, program)


def test_it_is_listed():
    assert "moe_a2a" in available_communication_backends()


def test_calls_out_of_order_are_refused():
    def program(group):
        comm, device = backend(group), default_device()
        x = torch.ones(1, HIDDEN, dtype=torch.bfloat16, device=device)
        ids = torch.zeros(1, TOPK, dtype=torch.int64, device=device)
        with pytest.raises(RuntimeError, match="rank 0 was called without a dispatch"):
            comm.combine(x)
        received = comm.dispatch(x, ids)
        with pytest.raises(RuntimeError, match="rank 0 follows a dispatch"):
            comm.dispatch(x, ids)
        comm.combine(torch.zeros_like(received.hidden_states))
        with pytest.raises(ValueError, match="eplb_local_stats on rank 0"):
            comm.dispatch(x, ids, eplb_local_stats=ids)
        comm.destroy()

    on_device.run(1, program)


def test_calls_that_one_rank_cannot_make_are_refused_on_the_other():
    def program(group):
        comm, device = backend(group), default_device()
        x = torch.ones(1, HIDDEN, dtype=torch.bfloat16, device=device)
        ids = torch.full((1, TOPK), EXPERTS_PER_RANK * (1 - comm.ep_rank), device=device)

        def refused(call, wrong, error, words):
            """Rank 0 makes the wrong call."""
            if comm.ep_rank == 0:
                with pytest.raises(error, match=words):
                    wrong()
                return
            with pytest.raises(moe_a2a.PeerRefusedError, match=f"rank 0 refused its call: .*{words}"):
                call()
                on_device.settle(comm._ep)

        def dispatch():
            return comm.dispatch(x, ids)

        refused(dispatch, lambda: comm.dispatch(x, ids, eplb_local_stats=ids), ValueError, "eplb_local_stats")
        y = torch.zeros_like(dispatch().hidden_states)
        refused(lambda: comm.combine(y), lambda: comm.combine(None), TypeError, "expert_output is a NoneType on rank 0")
        moe_a2a.as_group(group).all_gather(None)
        refused(lambda: comm.combine(y), lambda: comm.combine(y[0]), ValueError, r"y has shape \[256\]")
        # A sum that is sent again at once may arrive before the refusal is seen.
        moe_a2a.as_group(group).all_gather(None)
        assert torch.equal(comm.combine(y), torch.zeros_like(x))
        comm.destroy()

    on_device.run(2, program)


def test_what_fails_after_the_rows_have_arrived_is_refused_on_the_other():
    """Regression: the other rank waited in its combine until the deadline, and neither could dispatch again."""

    def program(group):
        comm, device = backend(group), default_device()
        x = torch.ones(1, HIDDEN, dtype=torch.bfloat16, device=device)
        ids = torch.full((1, TOPK), EXPERTS_PER_RANK * (1 - comm.ep_rank), device=device)
        right = comm.params
        if comm.ep_rank == 0:
            comm.params = types.SimpleNamespace(invalid_expert_id="none")
            with pytest.raises(TypeError, match="no_expert='none' is a str on rank 0"):
                comm.dispatch(x, ids)
            comm.params = right
        else:
            y = torch.zeros_like(comm.dispatch(x, ids).hidden_states)
            with pytest.raises(moe_a2a.PeerRefusedError, match="rank 0 refused its call: no_expert='none'"):
                comm.combine(y)
                on_device.settle(comm._ep)
        y = torch.zeros_like(comm.dispatch(x, ids).hidden_states)
        assert torch.equal(comm.combine(y), torch.zeros_like(x))
        comm.destroy()

    on_device.run(2, program)


@pytest.mark.parametrize("name", ["NVFP4", "MXFP4"])
def test_formats_that_it_does_not_send_are_refused(name):
    with pytest.raises(ValueError, match=f"dispatch_format={name} on rank 0"):
        backend(moe_a2a.thread_group(1)[0], dispatch_format=QuantFormat[name])


def test_parameters_that_one_rank_cannot_take():
    def program(group):
        rank = moe_a2a.as_group(group).rank
        changes = {"num_experts": 9} if rank == 0 else {}
        start = time.monotonic()
        with pytest.raises(ValueError if rank == 0 else RuntimeError, match=r"num_experts \(9\)"):
            backend(group, **changes)
        assert time.monotonic() - start < ranks.slack(5)
        backend(group).destroy()

    on_device.run(2, program)


@pytest.mark.parametrize(
    ("bootstrap", "options", "words"),
    [
        ({"rank": 2, "world_size": 3}, {}, "bootstrap says rank 2 of 3"),
        ({}, {"dtype": torch.float16}, "multiple values for keyword argument 'dtype'"),
        ({}, {"num_blocs": 1}, "num_blocs"),
    ],
    ids=["rank", "argument given twice", "argument"],
)
def test_what_fails_in_a_constructor_is_told_to_the_other(bootstrap, options, words):
    """Regression: the other rank waited until the deadline, or made an object that no call could use."""

    def program(group):
        own = moe_a2a.as_group(group)
        settings = {"world_size": 2, "rank": own.rank, "process_group": own}
        params = parameters(6 if "world_size" in bootstrap else 2)  # divisible by any number of ranks here
        if own.rank == 0:
            with pytest.raises((TypeError, ValueError, RuntimeError), match=words):
                create_communication(BootstrapConfig(**{**settings, **bootstrap}), params, "moe_a2a", **options)
        else:
            with pytest.raises(RuntimeError, match=f"rank 0 could not make its ExpertParallel: .*{words}"):
                create_communication(BootstrapConfig(**settings), params, "moe_a2a", timeout=ranks.slack(10))
        backend(group).destroy()

    on_device.run(2, program)


def test_a_bootstrap_of_other_ranks_is_refused():
    bootstrap = BootstrapConfig(world_size=2, rank=1, process_group=moe_a2a.thread_group(1)[0])
    with pytest.raises(ValueError, match="rank 1 of 2, its process_group rank 0 of 1"):
        create_communication(bootstrap, parameters(2), "moe_a2a")
