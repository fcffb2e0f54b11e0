"""TwoLevelExpertParallel over the ranks of one machine, split into nodes, beside ExpertParallel of all of them.

The groups between the nodes are gloo's, on GPUs NCCL's."""

import copy
import os
import time

import on_device
import pytest
import ranks
import torch
from ranks import DIED
from test_two_level import groups, integers, run

import moe_a2a
from moe_a2a import TwoLevelExpertParallel

pytestmark = on_device.TESTS

SPLITS = [(2, 2), (2, 1), (1, 2), (3, 2), (2, 3)]  # nodes, ranks of each
T, K, H = 40, 3, 144


def sizes(world, **how):
    return {
        "num_experts": 4 * world.size(),
        "num_topk": K,
        "hidden": H,
        "num_max_tokens_per_rank": T,
        "timeout": 20,
    } | how


def batch(generator, num_tokens, num_experts, dtype=torch.float32):
    """(x, topk_idx, topk_weights): small integers, some choices dropped."""
    x = integers(generator, (num_tokens, H), dtype)
    topk_idx = torch.rand(num_tokens, num_experts, generator=generator).topk(K).indices
    topk_idx[torch.rand(num_tokens, K, generator=generator) < 0.1] = -1
    return (
        x,
        topk_idx.to(x.device),
        torch.randint(1, 4, (num_tokens, K), generator=generator).to(x.device, torch.float32),
    )


def scaled_rows(handle, first_expert):
    """What experts that multiply by 1 + id % 5 return."""
    rows = handle.recv_x[handle.expert_row_index[: handle.num_routes].long()]
    counts = handle.expert_counts.long()
    factors = 1 + (first_expert + torch.arange(len(counts), device=rows.device)) % 5
    return rows * factors.repeat_interleave(counts)[:, None].to(rows.dtype)


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


def test_roundings(session_seed):
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


def test_layer(session_seed):
    run((2, 1) if on_device.IS_GPU else (2, 2), layer_program, session_seed)


# ---- failures


def arguments_program(world, num_nodes, num_local):
    node, rail = groups(num_nodes, num_local)
    rank = world.rank()
    with pytest.raises(TypeError, match=r"between is a int; pass a torch.distributed group of one rank of every node"):
        TwoLevelExpertParallel(node, 3, **sizes(world))
    for how, error in [
        ({"num_experts": 6}, "num_experts=6 is not divisible by num_ranks=4 .2 nodes of 2. on rank 1"),
        ({"hidden": 0}, r"hidden=0 is not in \[1, "),
        ({"hidden": "64"}, r"hidden='64' is a str on rank 1; pass an int"),
        ({"dtype": torch.int8}, r"dtype=torch.int8 on rank 1; pass torch.float32"),
        ({"axis": 1}, "unexpected keyword argument 'axis' on rank 1; leave it out"),
        ({"num_topk": K + 1}, "the nodes differ: num_topk on rank 1 of node 0: 4, on its peer of node 1: 3|other than"),
    ]:
        with pytest.raises(ValueError, match=error if rank == 1 else "nodes? .*differ: num_topk|a rank other than"):
            TwoLevelExpertParallel(node, rail, **sizes(world, **(how if rank == 1 else {})))
    # What only the node's ExpertParallel refuses.
    with pytest.raises((RuntimeError, ValueError, moe_a2a.PeerRefusedError), match="num_buffers|failed on its node"):
        TwoLevelExpertParallel(node, rail, **sizes(world, num_buffers=0 if rank == 1 else 2))
    # Regression: the ranks of the other node waited until their deadline.
    words = {1: "device='nonsense' is not a device on rank 1", 0: "^rank 1 could not make its Communicator: "}
    with pytest.raises((RuntimeError, ValueError), match=words.get(rank, "the call of rank . failed on its node, 0")):
        TwoLevelExpertParallel(node, rail, **sizes(world, **({"device": "nonsense"} if rank == 1 else {})))
    # Regression: all others waited until their deadline for a rank without a required argument.
    start, words = time.monotonic(), {1: "missing 1 required .*hidden", 0: "^rank 1 could not make its Co"}
    without = {name: size for name, size in sizes(world).items() if rank != 1 or name != "hidden"}
    for local in node, moe_a2a.Communicator(node, timeout=20):
        with pytest.raises(
            (TypeError, RuntimeError), match=words.get(rank, "the call of rank . failed on its node, 0")
        ):
            TwoLevelExpertParallel(local, rail, **without)
    assert time.monotonic() - start < ranks.slack(8)
    with local, TwoLevelExpertParallel(node, rail, **sizes(world)) as two:
        two.check()


@on_device.cpu_only
def test_wrong_arguments_are_refused_on_every_rank():
    run((2, 2), arguments_program)


def bad_calls_program(world, num_nodes, num_local, seed):
    """The error says what is wrong and where; whoever waits for that rank learns of it at once, and the object stays usable."""
    generator = torch.Generator().manual_seed(1000 * seed + world.rank())
    with TwoLevelExpertParallel(*groups(num_nodes, num_local), **sizes(world, dtype=torch.float32)) as two:
        rank = two.rank
        x, topk_idx, topk_weights = batch(generator, T, two.num_experts)
        topk_idx = torch.arange(K).expand(T, K) * 5 % two.num_experts + torch.zeros(T, 1, dtype=torch.int64)

        def works():
            handle = two.dispatch(x, topk_idx, topk_weights)
            return two.combine(scaled_rows(handle, 4 * rank), handle)

        expected = works()

        def refused(call, good, error, match):
            """`call` on rank 1 alone; `good` on the others, of which each that needs rank 1 is refused."""
            start = time.monotonic()
            with pytest.raises(error if rank == 1 else moe_a2a.PeerRefusedError, match=match if rank == 1 else None):
                call() if rank == 1 else good()
            assert time.monotonic() - start < ranks.slack(8), "a rank waited for its deadline"
            assert torch.equal(works(), expected), match

        def dispatches(*args, match, **how):
            refused(
                lambda: two.dispatch(*args, **how), lambda: two.dispatch(x, topk_idx), (ValueError, TypeError), match
            )

        dispatches([1.0], topk_idx, match="x is a list on rank 1; pass a torch.Tensor")
        dispatches(x, None, match="topk_idx is None on rank 1")
        dispatches(x[:, 1:], topk_idx, match=r"x has shape \[40, 143\], expected \[num_tokens, hidden=144\] on rank 1")
        dispatches(x.double(), topk_idx, match="x on rank 1 has dtype torch.float64")
        dispatches(torch.ones(T + 1, H), topk_idx, match="num_tokens=41 > num_max_tokens_per_rank=40 on rank 1")
        dispatches(x, topk_idx + 14, match=r"topk_idx\[\d+, \d\]=\d+ is not in \[-1, num_experts=16\) on rank 1")
        dispatches(x, topk_idx, topk_weights[1:], match="topk_weights has shape")
        dispatches(x, topk_idx, quantize="fp4", match="quantize='fp4' is unknown on rank 1")
        dispatches(x, topk_idx, layout="rowss", match="layout='rowss' is unknown on rank 1")
        dispatches(x, topk_idx, num_blocks=-1, match="num_blocks=-1 is not in")
        dispatches(x, topk_idx, axis=1, match="unexpected keyword argument 'axis'")
        dispatches(x.clone().requires_grad_(), topk_idx, match="x requires grad, which this call would not record")

        def out_of_memory(*args, **how):
            raise MemoryError("none")

        def fails_within():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(two.local, "_core_to_dispatch", out_of_memory)
                two.dispatch(x, topk_idx)

        refused(fails_within, lambda: two.dispatch(x, topk_idx), MemoryError, "none")
        dispatches(x, topk_idx, handle=3, match="both handle= and topk_idx|handle is a int on rank 1")

        def combines(match, error=(ValueError, TypeError, RuntimeError), use=None, **how):
            handle = two.dispatch(x, topk_idx, topk_weights)
            y = scaled_rows(handle, 4 * rank)
            call = (lambda: use(y, handle)) if use else lambda: two.combine(y, handle, **how)
            refused(call, lambda: two.combine(y, handle), error, match)
            assert not handle.is_open

        combines("y is a list on rank", use=lambda y, handle: two.combine([1.0], handle))
        combines("y has dtype torch.bfloat16", use=lambda y, handle: two.combine(y.bfloat16(), handle))
        combines(r"out is \[3\] of torch.float32 on cpu on rank 1, expected \[40, 144\]", out=torch.ones(3))
        combines("wire='q9' is unknown on rank", wire="q9")
        handle = two.dispatch(x, topk_idx, topk_weights)
        with pytest.raises((TypeError, moe_a2a.PeerRefusedError)) as caught:
            two.combine([1.0] if rank == 2 else scaled_rows(handle, 4 * rank), handle)
        assert str(caught.value).startswith("node 1, whose rank 0 is rank 2: ") == (two.node == 1)
        for call in two.combine, two.experts:
            handle = two.dispatch(x, topk_idx, topk_weights)
            y = scaled_rows(handle, 4 * rank)
            with pytest.raises(TypeError if rank == 1 else moe_a2a.PeerRefusedError, match=r"missing \d required|rank"):
                call(y) if rank == 1 else two.combine(y, handle)
            if handle.is_open:
                handle.release()
            assert torch.equal(works(), expected)
        with pytest.raises(moe_a2a.CallMismatchError, match=rf"rank {rank} called .*, rank \d of node {1 - two.node} "):
            two.dispatch(x, topk_idx, quantize="fp8" if two.node else None)
        assert torch.equal(works(), expected)
        for has_bytes in two.node == 1, rank == 1, rank % 2 == 1:  # the last: on both nodes alike
            scales = torch.ones(T, 5, dtype=torch.uint8) if has_bytes else torch.ones(T, 2)
            with pytest.raises(
                (moe_a2a.CallMismatchError, moe_a2a.PeerRefusedError), match="float8 rows|failed on its node"
            ):
                two.dispatch(x.to(torch.float8_e4m3fn), topk_idx, x_scales=scales)
            assert torch.equal(works(), expected)
        handle = two.dispatch(x, topk_idx, topk_weights)
        with pytest.raises(moe_a2a.CallMismatchError, match=r"called (dispatch|combine of dispatch \d+), rank"):
            two.dispatch(x, topk_idx) if two.node else two.combine(scaled_rows(handle, 4 * rank), handle)
        if handle.is_open:
            handle.release()
        assert torch.equal(works(), expected)
        handles = [two.dispatch(x, topk_idx, topk_weights) for _ in range(2)]
        with pytest.raises(moe_a2a.CallMismatchError, match=r"called combine of dispatch \d+, rank"):
            two.combine(scaled_rows(handles[two.node], 4 * rank), handles[two.node])
        handles[1 - two.node].release()
        assert torch.equal(works(), expected)
        handle = two.dispatch(x, topk_idx, topk_weights)
        with pytest.raises(TypeError if rank == 1 else moe_a2a.PeerRefusedError, match="handle is a int on rank|rank"):
            two.combine(scaled_rows(handle, 4 * rank), 1 if rank == 1 else handle)
        assert handle.is_open == (rank == 1)
        handle.release()
        assert torch.equal(works(), expected)


@on_device.cpu_only
def test_bad_calls(session_seed):
    run((2, 2), bad_calls_program, session_seed % 10_000)


def dead_rank_program(world, num_nodes, num_local, where):
    """Rank 3 dies in its dispatch, before or after the exchange between the nodes, or in its combine."""
    timeout = 3
    with TwoLevelExpertParallel(
        *groups(num_nodes, num_local), **sizes(world, dtype=torch.float32, timeout=timeout)
    ) as two:
        generator = torch.Generator().manual_seed(world.rank())
        x, topk_idx, topk_weights = batch(generator, T, two.num_experts)
        start = time.monotonic()
        with pytest.raises((moe_a2a.PeerTimeoutError, moe_a2a.PeerRefusedError, RuntimeError)):
            for call in range(10):
                if two.rank == 3 and call == 2 and where == "dispatch":
                    os._exit(0)
                if two.rank == 3 and call == 2 and where == "exchange":
                    two.local.dispatch = lambda *args, **how: os._exit(0)
                handle = two.dispatch(x, topk_idx, topk_weights)
                if two.rank == 3 and call == 2:
                    os._exit(0)
                two.combine(scaled_rows(handle, 4 * two.rank), handle)
        assert time.monotonic() - start < ranks.slack(4 * timeout + 4)


@on_device.cpu_only
@pytest.mark.parametrize("where", ["dispatch", "exchange", "combine"])
def test_a_dead_rank(where):
    assert run((2, 2), dead_rank_program, where, mortal={3})[3] == DIED
