"""MoELayer and ExpertParallel.experts() on N ranks against the whole layer in one process, with kernels and step by step."""

import on_device
import pytest
import torch
from gradients import own_part
from layer_cases import INTERMEDIATE, MAX_TOKENS, assert_as_exact_as_torch, make_ep, make_tokens, make_weights, on, rms
from torch import nn
from torch.optim.swa_utils import AveragedModel

import moe_a2a
from moe_a2a import reference
from moe_a2a.devices import float8_dtype
from moe_a2a.expert_weights import ExpertWeights

pytestmark = on_device.TESTS

KERNEL_DTYPES = [torch.float16, torch.bfloat16]
ROUTINGS = ["random", "empty_experts", "one_token", "all_on_one", "nothing"]


# ---- the layer


def run_layer(group, dtype, fused, intermediate, seed):
    with make_ep(group, dtype) as ep:
        weights = make_weights(ep.num_experts, dtype, seed, intermediate)
        layer = moe_a2a.MoELayer(ep, *own_part(ep, weights), fused=fused)
        calls = [make_tokens(ep, "random", seed + 8 * i + ep.rank, (7 * ep.rank + 11 * i) % 21) for i in range(6)]
        outs = [layer(*on(ep, tokens)).clone() for tokens in calls]
        assert_as_exact_as_torch(outs, calls, weights)


@pytest.mark.parametrize("dtype", [torch.float32, *KERNEL_DTYPES])
@pytest.mark.parametrize("num_ranks", [1, 3, 4])
@pytest.mark.parametrize("intermediate", [40, 80], ids=["no multiple of 16", "multiple of 16"])
def test_layer_matches_one_process(num_ranks, dtype, intermediate, session_seed):
    on_device.run(num_ranks, run_layer, dtype, None, intermediate, session_seed)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("num_ranks", [1, 3, 4])
@pytest.mark.parametrize("fused", [True, False])
def test_either_way_matches_one_process(num_ranks, dtype, fused, session_seed):
    on_device.run(num_ranks, run_layer, dtype, fused, INTERMEDIATE, session_seed)


def run_routing(group, routing, num_topk, seed):
    with make_ep(group, num_topk=num_topk) as ep:
        weights = make_weights(ep.num_experts, ep.dtype, seed)
        layer = moe_a2a.MoELayer(ep, *own_part(ep, weights), fused=True)
        tokens = make_tokens(ep, routing, seed + ep.rank)
        first = layer(*on(ep, tokens)).clone()
        assert_as_exact_as_torch([first], [tokens], weights)
        for _ in range(3):
            assert torch.equal(layer(*on(ep, tokens)), first)  # same inputs, same bits


@pytest.mark.parametrize("num_topk", [1, 3])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_any_routing(routing, num_topk, session_seed):
    on_device.run(2, run_routing, routing, num_topk, session_seed)


# ---- experts and combine of an open handle


def run_layout(group, layout, fused, seed):
    with make_ep(group) as ep:
        weights = make_weights(ep.num_experts, ep.dtype, seed)
        calls = [make_tokens(ep, "distinct", seed + 8 * i + ep.rank) for i in range(3)]
        outs = []
        for tokens in calls:
            handle = ep.dispatch(*on(ep, tokens), layout=layout)
            outs.append(ep.experts(handle, *own_part(ep, weights), fused=fused).clone())
            assert ep.device.type != "cpu" or not handle.is_open
        assert_as_exact_as_torch(outs, calls, weights)


@pytest.mark.parametrize("fused", [True, False, None])
@pytest.mark.parametrize("layout", ["rows", "expert_major", "masked"])
def test_experts_of_any_layout(layout, fused, session_seed):
    on_device.run(2, run_layout, layout, fused, session_seed)


def run_float8(group, seed):
    with make_ep(group) as ep:
        weights = make_weights(ep.num_experts, ep.dtype, seed)
        x, topk_idx, topk_weights = make_tokens(ep, "random", seed + ep.rank)
        out = ep.experts(ep.dispatch(*on(ep, (x, topk_idx, topk_weights)), quantize="fp8"), *own_part(ep, weights))
        rows = reference.dequantize_fp8(*reference.quantize_fp8(x.float(), float8_dtype(ep.device)))
        exact = reference.moe_layer(rows.double(), topk_idx, topk_weights, *(w.double() for w in weights))
        assert (out.cpu() - exact).norm() <= 0.01 * exact.norm()  # of the steps in bfloat16


def test_rows_of_float8_go_step_by_step(session_seed):
    on_device.run(2, run_float8, session_seed)


def quantized(ep, weights):
    """(values, scales) of both, and the fp64 weights that they represent."""
    gate_up, down = (
        reference.quantize_fp8_weights(w, halves, float8_dtype(ep.device))
        for w, halves in zip(weights, (2, 1), strict=True)
    )
    kept = [ExpertWeights(gate_up[0], down[0], gate_up[1], down[1]).of_expert(e) for e in range(len(down[0]))]
    return (gate_up, down), [torch.stack([of[i] for of in kept]).double() for i in range(2)]


def run_float8_weights(group, intermediate, fused, seed):
    with make_ep(group) as ep:
        both, exact_weights = quantized(ep, make_weights(ep.num_experts, torch.float32, seed, intermediate))
        given = [tuple(own_part(ep, pair)) for pair in both]
        layer = moe_a2a.MoELayer(ep, *given, fused=fused)
        assert sorted(layer.state_dict()) == ["w_down", "w_down_scales", "w_gate_up", "w_gate_up_scales"]
        with pytest.raises(ValueError, match="w_gate_up would become torch.bfloat16"):
            layer.to(torch.bfloat16)
        ours, steps, norms = [], [], []
        for call in range(3):
            x, topk_idx, topk_weights = make_tokens(ep, "random", seed + 8 * call + ep.rank)
            out = layer(*on(ep, (x, topk_idx, topk_weights))).cpu()
            rows = reference.dequantize_fp8(*reference.quantize_fp8(x.float(), float8_dtype(ep.device)))
            exact = reference.moe_layer(rows.double(), topk_idx, topk_weights, *exact_weights)
            assert out.dtype == ep.dtype
            ours.append(out - exact)
            steps.append(float8_layer(rows, topk_idx, topk_weights, *exact_weights).to(ep.dtype) - exact)
            norms.append(exact)
            handle = ep.dispatch(*on(ep, (x, topk_idx, topk_weights)), quantize="fp8")
            assert torch.equal(ep.experts(handle, *given, fused=fused).cpu(), out)
        return rms(ours) / rms(norms), rms(steps) / rms(norms)


def float8_layer(rows, topk_idx, topk_weights, w_gate_up, w_down):
    """Like the kernels: the first product's result becomes float8 for the second."""
    out = torch.zeros(rows.shape)
    for expert in range(len(w_down)):
        token, k = (topk_idx == expert).nonzero(as_tuple=True)
        gate, up = (rows[token] @ w_gate_up[expert].float().T).chunk(2, dim=1)
        inner = reference.dequantize_fp8(*reference.quantize_fp8(nn.functional.silu(gate) * up))
        y = (inner @ w_down[expert].float().T).bfloat16().float()
        out.index_add_(0, token, y * topk_weights[token, k, None])
    return out


@pytest.mark.parametrize("intermediate", [40, 80, 304])
def test_float8_weights_step_by_step(intermediate, session_seed):
    for error, _ in on_device.run(2, run_float8_weights, intermediate, False, session_seed):
        assert error <= 4e-3  # only the result is rounded


@pytest.mark.parametrize("intermediate", [80, 304])
def test_float8_weights_by_kernels(intermediate, session_seed):
    for error, in_torch in on_device.run(2, run_float8_weights, intermediate, True, session_seed):
        assert error <= 2 * in_torch, f"error {error}, PyTorch's own {in_torch}"


def run_out(group, seed):
    with make_ep(group) as ep:
        weights = own_part(ep, make_weights(ep.num_experts, ep.dtype, seed))
        tokens = on(ep, make_tokens(ep, "random", seed + ep.rank))
        expected = moe_a2a.MoELayer(ep, *weights)(*tokens)
        out = torch.full_like(expected, torch.nan)
        assert ep.experts(ep.dispatch(*tokens), *weights, out=out).data_ptr() == out.data_ptr()
        assert torch.equal(out, expected)


def test_experts_fill_out(session_seed):
    on_device.run(2, run_out, session_seed)


# ---- a bound on the intermediate results


def run_bounded(group, fused, seed):
    with make_ep(group, num_topk=1) as ep:
        weights = make_weights(ep.num_experts, ep.dtype, seed)
        tokens = make_tokens(ep, "all_on_one", seed + ep.rank)
        num_routes = MAX_TOKENS * group.num_ranks if ep.rank == group.num_ranks - 1 else 1
        enough, short = (
            moe_a2a.MoELayer(ep, *own_part(ep, weights), fused=fused, num_max_routes=n)
            for n in (num_routes, max(num_routes - 3, 1))
        )
        assert_as_exact_as_torch([enough(*on(ep, tokens))], [tokens], weights)
        ep.check()
        group.all_gather(None)
        if ep.rank == group.num_ranks - 1:
            with pytest.raises((ValueError, moe_a2a.RoutingError), match="num_max_routes|too short for 3 routes"):
                short(*on(ep, tokens))
                ep.check()
        elif ep.device.type == "cpu" or fused is False:
            with pytest.raises(moe_a2a.PeerRefusedError, match="num_max_routes"):
                short(*on(ep, tokens))
                on_device.settle(ep)
        else:
            short(*on(ep, tokens))
        group.all_gather(None)
        assert_as_exact_as_torch([enough(*on(ep, tokens))], [tokens], weights)


@pytest.mark.parametrize("fused", [True, False])
def test_more_routes_than_num_max_routes_raise(fused, session_seed):
    on_device.run(2, run_bounded, fused, session_seed)


# ---- as a module


def run_module(group, seed):
    with make_ep(group) as ep:
        weights = own_part(ep, make_weights(ep.num_experts, ep.dtype, seed))
        layer = nn.Sequential(moe_a2a.MoELayer(ep, *weights))[0]
        assert sorted(layer.state_dict()) == ["w_down", "w_gate_up"]
        assert [p.data_ptr() for p in layer.parameters()] == [w.data_ptr() for w in weights]  # no copy
        assert not any(p.requires_grad for p in layer.parameters())
        other = moe_a2a.MoELayer(ep, *(torch.zeros_like(w) for w in weights))
        other.load_state_dict(layer.state_dict())
        # Regression: the weights were replaced, and each later call was refused.
        half = {name: w.half() for name, w in layer.state_dict().items()}
        with pytest.raises(RuntimeError, match=rf"0.w_gate_up would become torch.float16 .*rank {ep.rank} needs"):
            nn.Sequential(other).load_state_dict({f"0.{name}": w for name, w in half.items()}, assign=True)
        other.load_state_dict(half)  # copies
        other.load_state_dict(layer.state_dict(), assign=True)
        tokens = on(ep, make_tokens(ep, "random", seed + ep.rank))
        assert torch.equal(layer(*tokens), other(*tokens))
        assert layer.to(ep.device).to(ep.dtype) is layer

        for move in (lambda: layer.half(), lambda: layer.to(torch.float64), lambda: layer.to("meta")):
            with pytest.raises(ValueError, match=rf"w_gate_up would become .*rank {ep.rank}"):
                move()
        for copied in (lambda: torch.save(layer, "/dev/null"), lambda: AveragedModel(nn.Sequential(layer))):
            with pytest.raises(TypeError, match="MoELayer cannot be copied or pickled .*save its state_dict"):
                copied()
        assert torch.equal(layer(*tokens), other(*tokens))
        way = "step by step" if ep.device.type == "cpu" else "by kernels"
        assert way in repr(layer) and "fused=False" in repr(moe_a2a.MoELayer(ep, *weights, fused=False))
        assert "by kernels" in repr(moe_a2a.MoELayer(ep, *weights, fused=True))


def test_it_is_a_module(session_seed):
    on_device.run(2, run_module, session_seed)


# ---- in a graph


def run_in_a_graph(group, seed):
    with make_ep(group, num_experts=8 * group.num_ranks) as ep:
        layer = moe_a2a.MoELayer(ep, *own_part(ep, make_weights(ep.num_experts, ep.dtype, seed)))
        tokens = on(ep, make_tokens(ep, "random", seed + ep.rank))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                layer(*tokens)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(*tokens)
        for replay in range(20):
            for tensor, new in zip(tokens, make_tokens(ep, ROUTINGS[replay % 2], seed + 10 * replay), strict=True):
                tensor.copy_(new)
            out.fill_(torch.nan)
            graph.replay()
            replayed = out.clone()
            assert torch.equal(layer(*tokens), replayed)  # the eager call, between replays
        torch.cuda.set_sync_debug_mode("error")
        try:
            layer(*tokens)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        ep.check()


@on_device.gpu_only
def test_a_captured_layer_takes_new_tokens(session_seed):
    on_device.run(on_device.most_ranks(), run_in_a_graph, session_seed)
