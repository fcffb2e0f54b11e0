"""MoELayer in grad mode: its gradients, also compiled."""

import types

import on_device
import pytest
import ranks
import torch
from gradients import (
    HIDDEN,
    assert_close,
    grads_of,
    leaves_of,
    make_batch,
    make_ep,
    make_layer,
    make_weights,
    own_part,
)
from torch import nn
from torch.nn.utils import parametrize

import moe_a2a
from moe_a2a import experts
from moe_a2a.integrations import experts_module

pytestmark = on_device.TESTS


def run_under_autocast(group, seed, dtype, device_type, other):
    """Products stay in the layer's dtype, recorded or not, also where PyTorch multiplies expert by expert."""
    with make_ep(group, dtype) as ep:
        layer, _ = make_layer(ep, seed, fused=False)
        batch = make_batch(ep, ep.rank, seed, "random")
        for recorded in (False, True):
            with torch.set_grad_enabled(recorded):
                x, topk_idx, topk_weights = leaves_of(ep, batch)
                expected = layer(x, topk_idx, topk_weights)
                with torch.autocast(device_type, dtype=other):
                    assert torch.equal(layer(x, topk_idx, topk_weights), expected)


@on_device.cpu_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("by_groups", [True, False])
def test_autocast_leaves_the_products_alone(monkeypatch, by_groups, dtype, session_seed):
    """Regression, float16: PyTorch refuses to join tensors of another 16-bit type than autocast's."""
    if not by_groups:
        monkeypatch.setattr(experts, "has_group_products", lambda *weights: False)
    ranks.run_threads(1, run_under_autocast, session_seed, dtype, "cpu", torch.bfloat16)


@on_device.cpu_only
def test_weights_that_are_not_leaves():
    (group,) = moe_a2a.thread_group(1)
    with make_ep(group, torch.float32) as ep:
        weights = [nn.Parameter(w) for w in own_part(ep, make_weights(ep, 0))]
        with pytest.raises(ValueError, match=r"w_down is computed from a tensor that requires grad.*pass a leaf"):
            moe_a2a.MoELayer(ep, weights[0], weights[1][:])


@on_device.cpu_only
def test_weights_that_begin_between_multiples_of_16_bytes():
    """Regression: PyTorch's products of all experts refuse them on a GPU; as parts of a flat buffer they may begin anywhere."""
    flat = torch.zeros(1 + 2 * 32 * 32, dtype=torch.bfloat16)
    part, whole = flat[1:].view(2, 32, 32), flat[:-1].view(2, 32, 32)
    assert experts.has_group_products(whole, whole) and not experts.has_group_products(whole, part)
    assert experts_module._torch_can_group(whole) and not experts_module._torch_can_group(part)


# ---- gradients


def run_layer(group, dtype, routing, options, seed):
    with make_ep(group, dtype) as ep:
        layer, weights = make_layer(ep, seed, **options)
        stepwise = moe_a2a.MoELayer(ep, layer.w_gate_up, layer.w_down, **{**options, "fused": False})
        for call in range(3):
            batches = [make_batch(ep, rank, seed + call, routing) for rank in range(ep.num_ranks)]
            x, topk_idx, topk_weights = leaves_of(ep, batches[ep.rank])
            layer.zero_grad()
            out = layer(x, topk_idx, topk_weights)
            with torch.no_grad():
                torch.testing.assert_close(out, stepwise(x, topk_idx, topk_weights))
            out.backward(batches[ep.rank].grad_out.to(ep.device))
            ep.check()
            assert layer.w_gate_up.grad is not None and layer.w_down.grad is not None  # also of experts without rows
            assert_close(ep, grads_of(layer, x, topk_weights), batches, weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_gradients_of_a_layer(num_ranks, dtype, session_seed):
    on_device.run(num_ranks, run_layer, dtype, "random", {}, session_seed)


@pytest.mark.parametrize("routing", ["zero_tokens", "zero_routes", "nothing", "no_weights"])
def test_any_routing(routing, session_seed):
    on_device.run(2, run_layer, torch.float32, routing, {}, session_seed)


@pytest.mark.parametrize("options", [{"wire": "q8"}, {"num_max_routes": 72}], ids=str)
def test_any_option(options, session_seed):
    on_device.run(2, run_layer, torch.float32, "random", options, session_seed)


@on_device.cpu_only
def test_without_group_products(monkeypatch, session_seed):
    monkeypatch.setattr(experts, "has_group_products", lambda *weights: False)
    ranks.run_threads(2, run_layer, torch.bfloat16, "random", {}, session_seed)


def test_group_products_need_rows_of_16_bytes():
    even, odd = torch.empty(2, 8, 16), torch.empty(2, 16, 7)
    assert experts.has_group_products(even)
    assert not experts.has_group_products(even, odd)


@on_device.cpu_only
def test_group_products_ask_the_gpu_of_the_weights(monkeypatch):
    """Regression: they asked the current one, which may be of another generation."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu=0: (9, 0) if gpu == 1 else (8, 0))
    weight = types.SimpleNamespace(
        is_cuda=True, device=1, dtype=torch.bfloat16, itemsize=2, stride=lambda _: 16, data_ptr=lambda: 0
    )
    assert experts.has_group_products(weight)


class LowRank(nn.Module):
    def __init__(self, like, seed):
        super().__init__()
        num_experts, rows, columns = like.shape
        generator = torch.Generator().manual_seed(seed)
        self.left = nn.Parameter(torch.randn(num_experts, rows, 2, generator=generator).to(like))
        self.right = nn.Parameter(torch.randn(num_experts, 2, columns, generator=generator).to(like))

    def forward(self, frozen):
        return frozen + self.left @ self.right


def run_adapted_layer(group, seed):
    with make_ep(group) as ep:
        layer, _ = make_layer(ep, seed)
        adapters = {name: LowRank(weight, seed) for name, weight in layer.named_parameters()}
        whole = moe_a2a.MoELayer(
            ep, *(nn.Parameter(adapters[name](weight).detach()) for name, weight in layer.named_parameters())
        )
        layer.requires_grad_(False)
        for name, adapter in adapters.items():
            parametrize.register_parametrization(layer, name, adapter)
        batch = make_batch(ep, ep.rank, seed)
        outs = [each(*leaves_of(ep, batch)) for each in (layer, whole)]
        assert torch.equal(*outs)
        for out in outs:
            out.backward(batch.grad_out.to(ep.device))
        for name, adapter in adapters.items():
            torch.testing.assert_close(adapter.left.grad, getattr(whole, name).grad @ adapter.right.mT)
        with pytest.raises(ValueError, match=rf"w_gate_up would become torch.float16 .*rank {ep.rank} needs"):
            layer.half()
        assert {p.dtype for p in layer.parameters()} == {ep.dtype}


def test_a_parametrized_layer(session_seed):
    """Its .half() was not refused: the weights to check are not among the layer's own parameters."""
    on_device.run(2, run_adapted_layer, session_seed)


def run_without_the_host(group, seed):
    with make_ep(group, torch.bfloat16) as ep:
        layer, weights = make_layer(ep, seed, num_max_routes=72)
        for call in range(3):
            batches = [make_batch(ep, rank, seed + call, "random") for rank in range(ep.num_ranks)]
            x, topk_idx, topk_weights = leaves_of(ep, batches[ep.rank])
            grad_out = batches[ep.rank].grad_out.to(ep.device)
            layer.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if call else "default")
            try:
                layer(x, topk_idx, topk_weights).backward(grad_out)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            ep.check()
            assert_close(ep, grads_of(layer, x, topk_weights), batches, weights)


@on_device.gpu_only
def test_with_a_bound_the_host_reads_nothing(session_seed):
    on_device.run(on_device.most_ranks(), run_without_the_host, session_seed)


def run_frozen_layer(group, seed):
    """Once the layer has been recorded, what requires grad may differ from rank to rank."""
    with make_ep(group) as ep:
        layer, weights = make_layer(ep, seed)
        for call in range(3):
            layer.requires_grad_(call == 0)
            batches = [make_batch(ep, rank, seed + call) for rank in range(ep.num_ranks)]
            x, topk_idx, topk_weights = leaves_of(ep, batches[ep.rank])
            is_frozen = call > 0 and ep.rank == 0
            if is_frozen:
                x, topk_weights = x.detach(), topk_weights.detach()
            out = layer(x, topk_idx, topk_weights)
            out.backward(batches[ep.rank].grad_out.to(ep.device))
            ep.check()
            names = () if is_frozen else ("x", "topk_weights")
            assert_close(ep, grads_of(layer, x, topk_weights), batches, weights, names)


def test_a_rank_where_nothing_requires_grad(session_seed):
    on_device.run(2, run_frozen_layer, session_seed)


# ---- under torch.compile


class Block(nn.Module):
    def __init__(self, layer, num_topk):
        super().__init__()
        self.layer, self.num_topk = layer, num_topk
        self.router = nn.Linear(HIDDEN, layer.ep.num_experts)

    def forward(self, x):
        topk_weights, topk_idx = self.router(x).softmax(-1).topk(self.num_topk)
        return x + self.layer(x * 2, topk_idx, topk_weights).tanh()


def run_compiled(group, seed):
    with make_ep(group, timeout=90) as ep:
        torch.manual_seed(seed)
        block = Block(make_layer(ep, seed)[0], ep.num_topk)
        compiled = torch.compile(block, backend="aot_eager", dynamic=True)
        for call in range(2):
            x = make_batch(ep, ep.rank, seed + call).x
            found = []
            for run in (compiled, block):
                block.zero_grad()
                out = run(x)
                out.sum().backward()
                found.append([out, *(p.grad.clone() for p in block.parameters())])
            for ours, eager in zip(*found, strict=True):
                torch.testing.assert_close(ours, eager)
        with pytest.raises(Exception, match=r"compile without fullgraph=True, or call it under torch.no_grad\(\)"):
            torch.compile(block, backend="aot_eager", fullgraph=True)(x)


@on_device.cpu_only
def test_a_compiled_layer_has_the_same_gradients(session_seed):
    ranks.run_processes(2, run_compiled, session_seed, timeout=120)
