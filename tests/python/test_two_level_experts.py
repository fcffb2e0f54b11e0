"""TwoLevelExpertParallel over the ranks of one machine, split into nodes, beside ExpertParallel of all of them."""

import copy

import on_device
import pytest
import torch
from node_groups import groups, run
from two_level_batches import H, K, T, batch, scaled_rows, sizes

import moe_a2a
from moe_a2a import TwoLevelExpertParallel

pytestmark = on_device.TESTS

SPLITS = [(2, 2), (2, 1), (1, 2), (3, 2), (2, 3)]  # nodes, ranks of each


def run_both(flat, two, x, topk_idx, topk_weights, **how):
    results = []
    for ep in (flat, two):
        handle = ep.dispatch(x, topk_idx, topk_weights, **how)
        results.append(ep.combine(scaled_rows(handle, ep.rank * ep.num_local_experts), handle))
    return results


def equal_program(world, num_nodes, num_local, seed):
    """Sums of integers are exact, so the bits equal those of a single level."""
    generator = torch.Generator().manual_seed(1000 * seed + world.rank())
    for dtype, idx_dtype in ((torch.float32, torch.int32), (torch.float16, torch.int64)):  # exact up to 2048
        how = sizes(world, dtype=dtype)
        with (
            moe_a2a.ExpertParallel(world, **how) as flat,
            TwoLevelExpertParallel(*groups(num_nodes, num_local), **how) as two,
        ):
            assert (two.rank, two.num_ranks, two.num_nodes) == (world.rank(), world.size(), num_nodes)
            assert (two.num_local_experts, two.nbytes > 0, two.is_closed) == (4, True, False)
            for num_tokens in (T, 0, 1, 17, T * (world.rank() % 2), 5):
                x, topk_idx, topk_weights = batch(generator, num_tokens, two.num_experts, dtype)
                topk_idx = topk_idx.to(idx_dtype)
                expected, got = run_both(flat, two, x, topk_idx, topk_weights)
                assert torch.equal(got, expected), (num_tokens, dtype, seed)
                expected, got = run_both(flat, two, x, topk_idx, None)
                assert torch.equal(got, expected), (num_tokens, dtype, seed)
            none = torch.full((T, K), -1, device=two.device)
            assert (run_both(flat, two, batch(generator, T, 4, dtype)[0], none, None)[1] == 0).all()
            two.check()
            with pytest.raises(TypeError, match="TwoLevelExpertParallel cannot be copied or pickled"):
                copy.copy(two)
            two.close()
    assert two.is_closed
    with pytest.raises(RuntimeError, match="closed"):
        two.dispatch(x, topk_idx)


@pytest.mark.parametrize("split", SPLITS)
def test_equals_one_level(split, session_seed):
    run(split, equal_program, session_seed % 10_000)


def layouts_program(world, num_nodes, num_local, seed):
    """Every layout, float8 rows, an `out`, presummed sums, a handle used again: the sums are those of a single level."""
    generator = torch.Generator().manual_seed(1000 * seed + world.rank())
    how = sizes(world, dtype=torch.float32, num_buffers=3)
    with (
        moe_a2a.ExpertParallel(world, **how) as flat,
        TwoLevelExpertParallel(*groups(num_nodes, num_local), **how) as two,
    ):
        x, topk_idx, topk_weights = batch(generator, T, two.num_experts)
        for layout in ({"layout": "expert_major", "expert_alignment": 8}, {"layout": "masked"}):
            results = []
            for ep in (flat, two):
                handle = ep.dispatch(x, topk_idx, topk_weights, **layout)
                out = torch.full((T, H), float("nan"), device=ep.device)
                y = handle.expert_x * 2
                y = y if handle.layout == "masked" else y[: handle.num_routes]
                assert ep.combine(y, handle, out=out) is out
                results.append(out)
            assert torch.equal(*results), (layout, seed)
        wide = torch.full((T, 2 * H), float("nan"), device=two.device)
        wide[:, :H] = x
        assert torch.equal(*run_both(flat, two, wide[:, :H], topk_idx, topk_weights))

        ready = moe_a2a.reference.quantize_fp8(x, moe_a2a.devices.float8_dtype(two.device))
        for rows, given in ((x, {"quantize": "fp8"}), (ready[0], {"x_scales": ready[1]})):
            results = []
            for ep in (flat, two):
                handle = ep.dispatch(rows, topk_idx, topk_weights, **given)
                index = handle.expert_row_index[: handle.num_routes].long()
                values = handle.recv_x.view(torch.uint8)[index].view(handle.row_dtype)
                y = moe_a2a.reference.dequantize_fp8(values, handle.recv_x_scales[index])
                results.append(ep.combine(y, handle))
            torch.testing.assert_close(*results)

        factors = torch.randint(0, 255, (T, -(-H // 32)), generator=generator).to(two.device, torch.uint8)
        results = []
        for ep in (flat, two):
            handle = ep.dispatch(ready[0], topk_idx, topk_weights, x_scales=factors)
            index = handle.expert_row_index[: handle.num_routes].long()
            y = handle.recv_x_scales[index].float().repeat_interleave(32, dim=1)[:, :H].contiguous()
            results.append(ep.combine(y, handle))
        torch.testing.assert_close(*results)

        first = two.dispatch(x, topk_idx, topk_weights)
        again = two.dispatch(2 * x, handle=first)
        assert (first.is_open, again.is_open) == (True, True)
        expected = two.combine(scaled_rows(first, 0), first)
        assert torch.equal(two.combine(scaled_rows(again, 0), again), 2 * expected)
        assert not first.is_open
        handle = two.dispatch(x, topk_idx, topk_weights)
        sums = moe_a2a.experts.simulated_experts(handle, 3.0)
        flat_handle = flat.dispatch(x, topk_idx, topk_weights)
        flat_sums = moe_a2a.experts.simulated_experts(flat_handle, 3.0)
        assert torch.equal(
            two.combine(sums, handle, presummed=True), flat.combine(flat_sums, flat_handle, presummed=True)
        )
        two.dispatch(x, topk_idx, topk_weights).release()
        assert torch.equal(*run_both(flat, two, x, topk_idx, topk_weights))


def test_layouts_and_types(session_seed):
    run((2, 1) if on_device.IS_GPU else (2, 2), layouts_program, session_seed % 10_000)


def rounded_program(world, num_nodes, num_local, seed):
    """Arbitrary bfloat16 values: a rank's sum, a node's sum and the result are each rounded once, ranks and nodes ascending."""
    generator = torch.Generator().manual_seed(seed)  # every rank draws the batches of all
    how = sizes(world)
    batches = [
        (torch.randn(T, H, generator=generator).bfloat16(),
         torch.rand(T, how["num_experts"], generator=generator).topk(K).indices,
         torch.rand(T, K, generator=generator))
        for _ in range(world.size())
    ]  # fmt: skip
    with TwoLevelExpertParallel(*groups(num_nodes, num_local), **how) as two:
        x, topk_idx, topk_weights = (t.to(two.device) for t in batches[two.rank])
        handle = two.dispatch(x, topk_idx, topk_weights)
        got = two.combine(scaled_rows(handle, 4 * two.rank), handle).cpu()
    x, topk_idx, topk_weights = batches[world.rank()]
    total = torch.zeros(T, H)
    for node in range(num_nodes):
        of_node = torch.zeros(T, H)
        for rank in range(node * num_local, (node + 1) * num_local):
            of_rank = torch.zeros(T, H)
            for k in range(K):
                is_here = (topk_idx[:, k] // 4 == rank)[:, None]
                y = x * (1 + topk_idx[:, k] % 5)[:, None].bfloat16()
                of_rank += torch.where(is_here, topk_weights[:, k : k + 1] * y.float(), 0.0)
            of_node += of_rank.bfloat16().float()
        total += of_node.bfloat16().float()
    assert torch.equal(got, total.bfloat16()), seed


def test_each_sum_is_rounded_once(session_seed):
    run((2, 1) if on_device.IS_GPU else (2, 2), rounded_program, session_seed)


def layer_program(world, num_nodes, num_local, seed):
    """MoELayer and experts() on two levels."""
    generator = torch.Generator().manual_seed(seed)
    how = sizes(world)
    weights = [
        torch.randn(how["num_experts"], *shape, generator=generator).bfloat16() / 12 for shape in ((64, H), (H, 32))
    ]
    batches = [batch(generator, T, how["num_experts"], torch.bfloat16) for _ in range(world.size())]
    with TwoLevelExpertParallel(*groups(num_nodes, num_local), **how) as two:
        mine = slice(4 * two.rank, 4 * two.rank + 4)
        own = [w[mine].to(two.device) for w in weights]
        x, topk_idx, topk_weights = (t.to(two.device) for t in batches[two.rank])
        x = x / 20
        layer = moe_a2a.MoELayer(two, *own)
        assert "TwoLevelExpertParallel" in repr(layer)
        out = layer(x, topk_idx, topk_weights)
        expected = moe_a2a.reference.moe_layer(x.cpu(), topk_idx.cpu(), topk_weights.cpu(), *weights)
        torch.testing.assert_close(out.cpu().float(), expected.float(), atol=0.05, rtol=0.05)
        handle = two.dispatch(x, topk_idx, topk_weights)
        assert torch.equal(two.experts(handle, *own), out)
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        with torch.no_grad():
            assert torch.equal(compiled(x, topk_idx, topk_weights), out)


def test_layer_equals_the_reference(session_seed):
    run((2, 1) if on_device.IS_GPU else (2, 2), layer_program, session_seed)


def inference_program(world, num_nodes, num_local):
    """Regression: a combine into a tensor that was made in inference mode failed outside of it, after the exchange."""
    with TwoLevelExpertParallel(*groups(num_nodes, num_local), **sizes(world, dtype=torch.float32)) as two:
        x, topk_idx, topk_weights = batch(torch.Generator().manual_seed(world.rank()), T, two.num_experts)
        with torch.inference_mode():
            out = torch.empty_like(x)
        expected, got = (
            two.combine(scaled_rows(handle, 4 * two.rank), handle, **how)
            for handle, how in ((two.dispatch(x, topk_idx, topk_weights), how) for how in ({}, {"out": out}))
        )
        assert got is out and torch.equal(out, expected)


def test_a_combine_into_a_tensor_of_inference_mode():
    run((2, 1), inference_program)


# ---- failures
