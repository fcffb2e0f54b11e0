"""torchtitan's RoutedExperts with our token dispatcher, against its own all-to-all and against one rank.

CI has no torchtitan. To run these: pip install torchtitan==0.3.0 triton (which a CPU build of PyTorch does not bring).
"""

import copy
import sys
from pathlib import Path

import pytest
import ranks
import torch

pytestmark = pytest.mark.cpu

SEED = 20261124
DIM, EXPERTS, TOPK, TOKENS = 64, 8, 2, 24


@pytest.fixture
def titan():
    pytest.importorskip("torchtitan", reason="torchtitan is not a test dependency: pip install torchtitan==0.3.0")


def config(dispatcher):
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts

    experts = GroupedExperts.Config(dim=DIM, hidden_dim=32, num_experts=EXPERTS)
    return RoutedExperts.Config(inner_experts=experts, token_dispatcher=dispatcher)


def a_batch(rank):
    generator = torch.Generator().manual_seed(SEED + rank)
    x = torch.randn(2, TOKENS // 2, DIM, generator=generator, dtype=torch.bfloat16)
    scores, ids = torch.rand(2, TOKENS // 2, EXPERTS, generator=generator).topk(TOPK)
    return x.requires_grad_(), scores.requires_grad_(), ids


def run_layer(layer, weights, mesh, batch):
    """Output and gradients of [x, scores, the weights]."""
    x, scores, ids = (tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in batch)
    for name, weight in layer.inner_experts.named_parameters():
        weight.data = weights[name].clone()
    layer.token_dispatcher.wire_meshes(ep_mesh=mesh)
    out = layer(x, scores, ids, torch.bincount(ids.flatten(), minlength=EXPERTS))
    out.float().square().sum().backward()
    return [out.detach(), x.grad, scores.grad, *(weight.grad for weight in layer.inner_experts.parameters())]


def program(group, alignment, capacity_factor):
    from torch.distributed.device_mesh import DeviceMesh
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, HybridEPTokenDispatcher

    from moe_a2a.integrations.torchtitan import (
        MoeA2ATokenDispatcher,
        moe_a2a_hybridep_override,
        moe_a2a_override,
    )

    set_spmd_backend("default")  # without the trainer's meshes
    rank, num_ranks = group.rank(), group.size()
    theirs = AllToAllTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOPK)
    if capacity_factor is None:
        ours = moe_a2a_override(theirs, pad_multiple=alignment, timeout=20.0)
    else:
        hybridep = HybridEPTokenDispatcher.Config(
            num_experts=EXPERTS, top_k=TOPK, non_blocking_capacity_factor=capacity_factor, pad_multiple=alignment
        )
        ours = moe_a2a_hybridep_override(hybridep, timeout=20.0)
    assert isinstance(ours.build(), MoeA2ATokenDispatcher)
    generator = torch.Generator().manual_seed(SEED - 1)
    whole = {
        name: torch.randn(parameter.shape, generator=generator) / 8
        for name, parameter in config(theirs).build().inner_experts.named_parameters()
    }
    num_local = EXPERTS // num_ranks
    local = {name: weight[rank * num_local :][:num_local] for name, weight in whole.items()}
    mesh = DeviceMesh.from_group(group, "cpu")
    batches = [a_batch(r) for r in range(num_ranks)]
    for _ in range(2):
        results = [run_layer(config(copy.deepcopy(c)).build(), local, mesh, batches[rank]) for c in (ours, theirs)]
        alone = [run_layer(config(copy.deepcopy(theirs)).build(), whole, None, batch) for batch in batches]
    wanted = alone[rank][:3]
    for position in range(3, 6):
        wanted.append(sum(one[position] for one in alone)[rank * num_local :][:num_local])
    for what, mine, all_to_all, one in zip(("out", "x", "scores", "w1", "w2", "w3"), *results, wanted, strict=True):
        # bfloat16: the order of sums differs.
        torch.testing.assert_close(mine, one, rtol=0.03, atol=0.03 * one.float().abs().max().item(), msg=what)
        error, peer_error = ((result - one).float().norm().item() for result in (mine, all_to_all))
        assert error <= peer_error + 0.01 * one.float().norm().item(), (what, error, peer_error)


@pytest.mark.parametrize(
    ("num_ranks", "alignment", "capacity_factor"),
    [(2, 1, None), (2, 16, None), (4, 1, None), (2, 1, 1.0), (2, 16, 1.0)],
)
def test_layers_and_gradients_are_those_of_one_rank(titan, num_ranks, alignment, capacity_factor):
    print(f"seed {SEED}")
    ranks.run_processes(num_ranks, program, alignment, capacity_factor)


def through_deep_ep(group):
    """torchtitan's DeepEP backend on our package of that name: forward, gradients, and its form for captured graphs."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "compat" / "deep_ep"))
    from torchtitan.distributed.deepep import deepep

    for name in ("dispatch", "combine"):  # registered for GPUs only
        deepep._lib.impl(name, getattr(deepep, f"_{name}_op_impl"), "CPU")
    rank, num_ranks = group.rank(), group.size()
    num_experts, num_local = 4 * num_ranks, 4
    deepep.get_buffer(group, hidden=DIM, num_max_tokens_per_rank=TOKENS, num_topk=TOPK)
    generator = torch.Generator().manual_seed(SEED + rank)
    scores, ids = torch.rand(TOKENS, num_experts, generator=generator).topk(TOPK)
    x, scores = torch.randn(TOKENS, DIM, generator=generator).requires_grad_(), scores.requires_grad_()
    factors = 1 + torch.arange(num_experts) / num_experts

    def factors_of(counts):
        return factors[rank * num_local :][:num_local].repeat_interleave(counts)[:, None]

    rows, counts, state = deepep.dispatch_tokens(x, ids, scores, num_local, num_experts, num_tokens_per_rank=TOKENS)
    out = deepep.combine_tokens(rows * factors_of(counts), state)
    deepep.sync_combine()
    out.square().sum().backward()
    want_x, want_scores = x.detach().clone().requires_grad_(), scores.detach().clone().requires_grad_()
    want = want_x * (want_scores * factors[ids]).sum(1, keepdim=True)
    want.square().sum().backward()
    for mine, wanted in ((out, want), (x.grad, want_x.grad), (scores.grad, want_scores.grad)):
        torch.testing.assert_close(mine, wanted)
    with torch.no_grad():
        rows, counts, state = deepep.dispatch_tokens(
            x, ids, scores, num_local, num_experts, num_tokens_per_rank=TOKENS, cudagraphable=True
        )
        rows[: counts.sum()] *= factors_of(counts)
        torch.testing.assert_close(deepep.combine_tokens(rows, state), want)


def test_its_deep_ep_backend_runs_on_our_package(titan):
    print(f"seed {SEED}")
    ranks.run_processes(2, through_deep_ep)


def through_hybrid_ep(group, capacity_factor, pad_multiple):
    """torchtitan's HybridEP backend on our package deep_ep: forward and gradients."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "compat" / "deep_ep"))
    from torch._library import opaque_object

    if not hasattr(opaque_object, "CustomClassBase"):  # its name in a later PyTorch
        opaque_object.CustomClassBase = opaque_object.OpaqueBase
    from torchtitan.distributed.deepep import hybridep

    for op in (
        hybridep._dispatch_impl,
        hybridep._combine_impl,
        hybridep._dispatch_bwd_impl,
        hybridep._combine_bwd_impl,
    ):
        op.register_kernel("cpu")(op._init_fn)  # registered for GPUs only
    rank, num_ranks = group.rank(), group.size()
    num_experts, num_local = 4 * num_ranks, 4
    generator = torch.Generator().manual_seed(SEED + rank)
    scores, ids = torch.rand(TOKENS, num_experts, generator=generator).topk(TOPK)
    x, scores = torch.randn(TOKENS, DIM, generator=generator).requires_grad_(), scores.requires_grad_()
    factors = 1 + torch.arange(num_experts) / num_experts
    out = x
    for _ in range(2):
        hybridep.get_buffer(group, DIM, TOKENS, num_local)
        rows, counts, state = hybridep.dispatch_tokens(
            out,
            ids,
            scores,
            num_local,
            num_experts,
            group,
            non_blocking_expert_capacity_factor=capacity_factor,
            pad_multiple=pad_multiple,
        )
        of_rows = torch.zeros(len(rows), 1)
        of_rows[: counts.sum(), 0] = factors[rank * num_local :][:num_local].repeat_interleave(counts)
        out = hybridep.combine_tokens(rows * of_rows, state, pad_multiple)
    out.square().sum().backward()
    want_x, want_scores = x.detach().clone().requires_grad_(), scores.detach().clone().requires_grad_()
    want = want_x
    for _ in range(2):
        want = want * (want_scores * factors[ids]).sum(1, keepdim=True)
    want.square().sum().backward()
    for mine, wanted in ((out, want), (x.grad, want_x.grad), (scores.grad, want_scores.grad)):
        torch.testing.assert_close(mine, wanted)
    hybridep._buffer.destroy()


@pytest.mark.parametrize(("capacity_factor", "pad_multiple"), [(None, None), (None, 16), (1.0, None)])
def test_its_hybrid_ep_backend_runs_on_our_package(titan, capacity_factor, pad_multiple):
    print(f"seed {SEED}")
    ranks.run_processes(2, through_hybrid_ep, capacity_factor, pad_multiple)


def test_without_expert_parallelism_it_is_torchtitans(titan):
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    from moe_a2a.integrations.torchtitan import MoeA2ATokenDispatcher

    sizes = {"num_experts": EXPERTS, "top_k": TOPK}
    torch.manual_seed(SEED)
    weights = {
        n: torch.randn_like(p)
        for n, p in config(LocalTokenDispatcher.Config(**sizes)).build().inner_experts.named_parameters()
    }
    results = [
        run_layer(config(kind.Config(**sizes)).build(), weights, None, a_batch(0))
        for kind in (MoeA2ATokenDispatcher, LocalTokenDispatcher)
    ]
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


def test_the_override_takes_the_padding_along(titan):
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.common.token_dispatcher import TorchAOTokenDispatcher

    from moe_a2a.integrations.torchtitan import MoeA2ATokenDispatcher

    layer = config(TorchAOTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOPK, pad_multiple=32))
    apply_overrides(OverrideConfig(imports=["moe_a2a.integrations.torchtitan.moe_a2a_override"]), layer)
    dispatcher = layer.token_dispatcher
    assert isinstance(dispatcher, MoeA2ATokenDispatcher.Config)
    assert (dispatcher.num_experts, dispatcher.top_k, dispatcher.pad_multiple) == (EXPERTS, TOPK, 32)
