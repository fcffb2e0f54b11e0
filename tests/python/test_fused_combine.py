"""The second product that sends its rows itself: the bits of the product followed by the combine, for any routing, and the
same failures."""

import on_device
import pytest
import torch

import moe_a2a
from moe_a2a import reference
from moe_a2a.devices import float8_dtype

pytestmark = [on_device.TESTS, pytest.mark.usefixtures("fresh_memory_is_poisoned")]

INTERMEDIATE = 80
ROUTINGS = ["random", "empty_experts", "one_token", "all_on_one", "nothing", "repeated_choices", "one_source"]


def make_ep(group, dtype=torch.bfloat16, **config):
    """Several tiles of columns on every target, the last one not full. No batch is small."""
    config = {"num_topk": 3, "num_experts": 4 * group.num_ranks, "timeout": 20, "hidden": 784,
              "num_max_tokens_per_rank": 90, "num_max_ll_tokens": 0, **config}  # fmt: skip
    return moe_a2a.ExpertParallel(group, dtype=dtype, **config)


def weights_of(ep, seed, dtype=None):
    generator = torch.Generator().manual_seed(seed + 100 * ep.rank)
    shapes = (ep.num_local_experts, 2 * INTERMEDIATE, ep.hidden), (ep.num_local_experts, ep.hidden, INTERMEDIATE)
    return [
        torch.randn(shape, generator=generator).div_(shape[2] ** 0.5).to(ep.device, dtype or ep.dtype)
        for shape in shapes
    ]


def make_tokens(ep, routing, seed):
    generator = torch.Generator().manual_seed(seed + 1000 * ep.rank)
    num_tokens = int(torch.randint(0, ep.num_max_tokens_per_rank + 1, (), generator=generator))
    if routing == "nothing" or (routing in ("one_token", "one_source") and ep.rank > 0):
        num_tokens = 0
    elif routing == "one_token":
        num_tokens = 1
    elif routing == "everywhere":  # every rank sends to every rank
        num_tokens = ep.num_max_tokens_per_rank
    topk_idx = torch.randint(-1, ep.num_experts, (num_tokens, ep.num_topk), generator=generator)
    if routing == "everywhere":
        topk_idx = torch.arange(topk_idx.numel()).view(topk_idx.shape) % ep.num_experts
    elif routing == "empty_experts":
        topk_idx[topk_idx % 3 > 0] = 0
    elif routing == "repeated_choices":
        topk_idx[:] = topk_idx[:, :1]
    elif routing == "all_on_one":
        topk_idx[:, :-1], topk_idx[:, -1:] = -1, ep.num_experts - 1
    x = torch.randn(num_tokens, ep.hidden, generator=generator).to(ep.dtype)
    return [tensor.to(ep.device) for tensor in (x, topk_idx, torch.rand(num_tokens, ep.num_topk, generator=generator))]


def both_ways(ep, tokens, weights, dispatch=None, **options):
    """Results of two calls with the same tokens: product then combine, and fused."""
    outs = []
    for fused_combine in (False, True):
        handle = ep.dispatch(*tokens, **(dispatch or {}))
        outs.append(ep.experts(handle, *weights, fused=True, fused_combine=fused_combine, **options).clone())
    return outs


def assert_same_bits(ep, outs, tokens):
    on_device.settle(ep)
    assert outs[0].shape == tokens[0].shape and not outs[0].isnan().any()
    assert torch.equal(*(out.view(torch.int16) for out in outs))


def run_routing(group, routing, num_topk, dtype, layout, seed):
    with make_ep(group, dtype, num_topk=num_topk) as ep:
        weights = weights_of(ep, seed)
        for call in range(4):  # more often than there are buffers
            tokens = make_tokens(ep, routing, seed + call)
            assert_same_bits(ep, both_ways(ep, tokens, weights, layout), tokens)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("num_topk", [1, 3])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_same_bits_with_any_routing(routing, num_topk, num_ranks, session_seed):
    on_device.run(num_ranks, run_routing, routing, num_topk, torch.bfloat16, {}, session_seed)


@pytest.mark.parametrize("alignment", [1, 7, 128])
def test_same_bits_in_expert_major(alignment, session_seed):
    layout = {"layout": "expert_major", "expert_alignment": alignment}
    on_device.run(2, run_routing, "random", 3, torch.float16, layout, session_seed)


def run_float8(group, seed):
    with make_ep(group) as ep:
        weights = [
            tuple(
                part.to(ep.device) for part in reference.quantize_fp8_weights(w.cpu(), halves, float8_dtype(ep.device))
            )
            for w, halves in zip(weights_of(ep, seed, torch.float32), (2, 1), strict=True)
        ]
        for call in range(3):
            tokens = make_tokens(ep, "random", seed + call)
            assert_same_bits(ep, both_ways(ep, tokens, weights, {"quantize": "fp8"}), tokens)


def test_same_bits_in_float8(session_seed):
    on_device.run(2, run_float8, session_seed)


def run_layer(group, seed):
    with make_ep(group) as ep:
        weights = weights_of(ep, seed)
        layer = moe_a2a.MoELayer(ep, *weights, fused=True, fused_combine=True)
        tokens = make_tokens(ep, "random", seed)
        expected = ep.experts(ep.dispatch(*tokens), *weights, fused=True, fused_combine=False).clone()
        for _ in range(5):
            assert torch.equal(layer(*tokens), expected)
        out = torch.full_like(expected, torch.nan)
        assert (
            ep.experts(ep.dispatch(*tokens), *weights, fused=True, fused_combine=True, out=out).data_ptr()
            == out.data_ptr()
        )
        assert torch.equal(out, expected)
        on_device.settle(ep)


def test_layer_and_out(session_seed):
    on_device.run(2, run_layer, session_seed)


def run_ragged(group, seed):
    """Only some ranks fuse: nothing on the wire shows it."""
    with make_ep(group) as ep:
        weights = weights_of(ep, seed)
        for call in range(4):
            tokens = make_tokens(ep, "random", seed + call)
            outs = []
            for fused_combine in (False, ep.rank % 2 == call % 2):
                handle = ep.dispatch(*tokens)
                outs.append(ep.experts(handle, *weights, fused=True, fused_combine=fused_combine).clone())
            assert_same_bits(ep, outs, tokens)


def test_ranks_may_go_different_ways(session_seed):
    on_device.run(3, run_ragged, session_seed)


# ---- what it refuses


def run_refused(group, seed):
    with make_ep(group, num_max_ll_tokens=8) as ep:
        weights = weights_of(ep, seed)
        x = torch.ones(8, ep.hidden, dtype=ep.dtype, device=ep.device)
        tokens = [x, torch.zeros(8, ep.num_topk, dtype=torch.int64, device=ep.device), None]
        for layout, fused, words in (
            ("rows", True, "num_tokens=8 <= num_max_ll_tokens=8"),
            ("rows", False, "step by step"),
            ("masked", True, '"masked"'),
        ):
            handle = ep.dispatch(*tokens, layout=layout)
            with pytest.raises(ValueError, match=words) as raised:
                ep.experts(handle, *weights, fused=fused, fused_combine=True)
            assert f"rank {ep.rank}" in str(raised.value) and "fused_combine" in str(raised.value)
            group.all_gather(None)
            handle.release()
            group.all_gather(None)
        with pytest.raises(TypeError, match="fused_combine"):
            moe_a2a.MoELayer(ep, *weights, fused_combine=1)
        assert not ep.experts(ep.dispatch(*tokens), *weights, fused=True).isnan().any()
        on_device.settle(ep)


def test_what_it_cannot_take_is_said(session_seed):
    on_device.run(2, run_refused, session_seed)


def run_too_few_rows(group, seed):
    with make_ep(group) as ep:
        weights = weights_of(ep, seed)
        tokens = make_tokens(ep, "all_on_one", seed)
        handle = ep.dispatch(*tokens)
        num_routes = handle.num_routes
        if ep.device.type == "cpu" and num_routes > 1:
            with pytest.raises(ValueError, match="num_max_routes"):
                ep.experts(handle, *weights, fused=True, fused_combine=True, num_max_routes=num_routes - 1)
        group.all_gather(None)
        bound = max(1, num_routes)
        if handle.is_open:
            try:
                ep.experts(handle, *weights, fused=True, fused_combine=True, num_max_routes=bound)
                on_device.settle(ep)
            except moe_a2a.PeerRefusedError:
                assert ep.device.type == "cpu"  # another rank exceeded the bound


def test_a_bound_on_the_routes(session_seed):
    on_device.run(2, run_too_few_rows, session_seed)


# ---- peers that fail in the meantime


def run_peer_refuses(group, seed):
    with make_ep(group) as ep:
        weights = weights_of(ep, seed)
        tokens = make_tokens(ep, "everywhere", seed)  # a rank that needs no sum from the refusing one learns nothing
        expected = ep.experts(ep.dispatch(*tokens), *weights, fused=True).clone()
        for _ in range(3):
            handle = ep.dispatch(*tokens)
            if ep.rank == 1:
                with pytest.raises(ValueError, match="w_gate_up"):
                    ep.experts(handle, weights[0][1:], weights[1], fused=True, fused_combine=True)
            else:
                with pytest.raises(moe_a2a.PeerRefusedError, match="w_gate_up"):
                    ep.experts(handle, *weights, fused=True, fused_combine=True)
                    ep.check()
            group.all_gather(None)
            assert torch.equal(ep.experts(handle, *weights, fused=True, fused_combine=True), expected)  # all retry
            on_device.settle(ep)


def test_a_peer_refuses(session_seed):
    on_device.run(2, run_peer_refuses, session_seed)


def run_peer_leaves(group, seed):
    ep = make_ep(group, timeout=1.5)
    weights = weights_of(ep, seed)
    handle = ep.dispatch(*make_tokens(ep, "everywhere", seed))
    on_device.settle(ep)
    group.all_gather(None)
    if ep.rank != 1:  # rank 1 never combines
        with pytest.raises(moe_a2a.PeerTimeoutError) as raised:
            ep.experts(handle, *weights, fused=True, fused_combine=True)
            ep.check()
        assert "rank 1" in str(raised.value)
    group.all_gather(None)
    ep.close()


def test_a_peer_that_never_combines(session_seed):
    on_device.run(3, run_peer_leaves, session_seed)


# ---- captured


def run_captured(group, seed):
    with make_ep(group) as ep:
        weights = weights_of(ep, seed)
        x, topk_idx, topk_weights = make_tokens(ep, "random", seed)
        layers = [moe_a2a.MoELayer(ep, *weights, fused_combine=fuses) for fuses in (False, True)]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for layer in layers:
                layer(x, topk_idx, topk_weights)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [layer(x, topk_idx, topk_weights) for layer in layers]
        generator = torch.Generator(ep.device).manual_seed(seed + ep.rank)
        for _ in range(50):
            topk_idx.random_(-1, ep.num_experts, generator=generator)
            x.normal_(generator=generator)
            graph.replay()
            assert_same_bits(ep, outs, [x])


@on_device.gpu_only
def test_captured_in_a_graph(session_seed):
    on_device.run(on_device.most_ranks(), run_captured, session_seed)
