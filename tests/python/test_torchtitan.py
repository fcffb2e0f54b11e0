"""torchtitan's RoutedExperts with our token dispatcher, against its own all-to-all and against one rank.

CI has no torchtitan. To run these: pip install torchtitan==0.3.0.
"""

import copy

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


def program(group, alignment):
    from torch.distributed.device_mesh import DeviceMesh
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    from moe_a2a.integrations.torchtitan import MoeA2ATokenDispatcher, moe_a2a_override

    set_spmd_backend("default")  # without the trainer's meshes
    rank, num_ranks = group.rank(), group.size()
    theirs = AllToAllTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOPK)
    ours = moe_a2a_override(theirs, expert_alignment=alignment, timeout=20.0)
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


@pytest.mark.parametrize(("num_ranks", "alignment"), [(2, 1), (2, 16), (4, 1)])
def test_layers_and_gradients_are_those_of_one_rank(titan, num_ranks, alignment):
    print(f"seed {SEED}")
    ranks.run_processes(num_ranks, program, alignment)


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
    assert (dispatcher.num_experts, dispatcher.top_k, dispatcher.expert_alignment) == (EXPERTS, TOPK, 32)
