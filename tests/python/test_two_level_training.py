"""Gradients over several nodes, which are those of one process that has all tokens and all experts."""

import time

import on_device
import pytest
import ranks
import torch
from gradients import HIDDEN, MAX_TOKENS, assert_close, grads_of, leaves_of, make_batch, make_layer
from node_groups import groups, run
from torch.utils.checkpoint import checkpoint

import moe_a2a

pytestmark = on_device.TESTS


def make_two(world, split, dtype=torch.float32):
    how = {"num_experts": 4 * world.size(), "num_topk": 3, "hidden": HIDDEN, "num_max_tokens_per_rank": MAX_TOKENS}
    return moe_a2a.TwoLevelExpertParallel(*groups(*split), dtype=dtype, timeout=20, **how)


def backward_of(two, layer, batches):
    x, topk_idx, topk_weights = leaves_of(two, batches[two.rank])
    layer.zero_grad()
    out = layer(x, topk_idx, topk_weights)
    out.backward(batches[two.rank].grad_out.to(two.device))
    return out, grads_of(layer, x, topk_weights)


def layer_program(world, num_nodes, num_local, dtype, routing, seed):
    with make_two(world, (num_nodes, num_local), dtype) as two:
        layer, weights = make_layer(two, seed)
        for call in range(3):
            batches = [make_batch(two, rank, seed + call, routing) for rank in range(two.num_ranks)]
            out, grads = backward_of(two, layer, batches)
            with torch.no_grad():
                x, topk_idx, topk_weights = leaves_of(two, batches[two.rank])
                torch.testing.assert_close(out, layer(x, topk_idx, topk_weights))
            assert_close(two, grads, batches, weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("split", [(2, 2), (3, 1)])
def test_gradients_of_a_layer(split, dtype, session_seed):
    run(split, layer_program, dtype, "random", session_seed)


@pytest.mark.parametrize("routing", ["zero_tokens", "zero_routes", "nothing", "no_weights"])
def test_any_routing(routing, session_seed):
    run((2, 1), layer_program, torch.float32, routing, session_seed)


def dispatcher_program(world, num_nodes, num_local, seed):
    """Experts of one's own, with and without weights applied by them, recomputed by a checkpoint, two batches in flight."""
    with make_two(world, (num_nodes, num_local)) as two:
        dispatcher = moe_a2a.TwoLevelTokenDispatcher(two)
        layer, weights = make_layer(two, seed)
        batches = [[make_batch(two, rank, seed + i) for rank in range(two.num_ranks)] for i in range(2)]

        def forward(x, topk_idx, topk_weights, weighted=True):
            rows, routes = dispatcher.dispatch(x, topk_idx, topk_weights, expert_alignment=8)
            with routes.refused_if_failed():
                y = moe_a2a.experts.swiglu_of_each(rows, routes.split_sizes, layer.w_gate_up, layer.w_down)
                y = y if weighted else y * routes.weights[:, None]
            return dispatcher.combine(y, routes, weighted=weighted)

        def checkpointed(*inputs):
            return checkpoint(forward, *inputs, use_reentrant=False)

        for run_forward in (forward, lambda *inputs: forward(*inputs, weighted=False), checkpointed):
            inputs = [leaves_of(two, batch[two.rank]) for batch in batches]
            outs = [run_forward(*batch) for batch in inputs]
            for i in (1, 0):
                layer.zero_grad()
                outs[i].backward(batches[i][two.rank].grad_out.to(two.device))
                assert_close(two, grads_of(layer, inputs[i][0], inputs[i][2]), batches[i], weights)


def test_gradients_of_a_dispatcher(session_seed):
    run((2, 1) if on_device.IS_GPU else (2, 2), dispatcher_program, session_seed)


def failures_program(world, num_nodes, num_local, seed):
    """Whoever waits for rank 1 learns of its error at once, and the next step is right on every rank."""
    with make_two(world, (num_nodes, num_local)) as two:
        dispatcher = moe_a2a.TwoLevelTokenDispatcher(two)
        layer, weights = make_layer(two, seed)
        batches = [make_batch(two, rank, seed, "full") for rank in range(two.num_ranks)]
        for batch in batches:  # every rank needs every other
            batch.topk_idx = torch.arange(batch.topk_idx.numel()).view_as(batch.topk_idx) % two.num_experts
        x, topk_idx, topk_weights = leaves_of(two, batches[two.rank])
        rank = two.rank

        def no_memory(self, *_):
            raise MemoryError("none")

        def experts_fail():
            rows, routes = dispatcher.dispatch(x, topk_idx, topk_weights)
            with routes.refused_if_failed():
                if rank == 1:
                    raise MemoryError("none")
            dispatcher.combine(rows, routes)

        def bad_dispatch():
            dispatcher.dispatch(x if rank != 1 else x[:, 1:], topk_idx, topk_weights)

        def bad_bound():
            dispatcher.dispatch(x, topk_idx, topk_weights, num_max_routes=0 if rank == 1 else 100)

        def bad_y():
            rows, routes = dispatcher.dispatch(x, topk_idx, topk_weights)
            dispatcher.combine(rows if rank != 1 else rows[1:], routes)

        def bad_routes():
            rows, routes = dispatcher.dispatch(x, topk_idx, topk_weights)
            dispatcher.combine(rows, routes if rank != 1 else None)

        def no_routes():
            rows, routes = dispatcher.dispatch(x, topk_idx, topk_weights)
            dispatcher.combine(rows, routes) if rank != 1 else dispatcher.combine(rows)

        def transformed():
            def run(x):
                return dispatcher.combine(*dispatcher.dispatch(x, topk_idx, topk_weights)).sum()

            run(x) if rank != 1 else torch.func.grad(run)(x.detach())

        def transformed_combine():
            rows, routes = dispatcher.dispatch(x, topk_idx, topk_weights)
            transform = torch.func.grad if rank == 1 else lambda call: call
            transform(lambda y: dispatcher.combine(y, routes).sum())(rows.detach())

        def bad_signature():
            layer(x, topk_idx, topk_weights) if rank != 1 else layer(x)

        for call, error in [
            (experts_fail, MemoryError), (bad_dispatch, ValueError), (bad_bound, ValueError), (bad_y, ValueError),
            (bad_routes, TypeError), (no_routes, TypeError), (transformed, RuntimeError), (transformed_combine, RuntimeError),
            (bad_signature, TypeError),
        ]:  # fmt: skip
            start = time.monotonic()
            with pytest.raises(error if rank == 1 else moe_a2a.PeerRefusedError):
                call()
            assert time.monotonic() - start < ranks.slack(8), call.__name__
            assert_close(two, backward_of(two, layer, batches)[1], batches, weights)
        with pytest.raises(TypeError, match="make a TwoLevelTokenDispatcher"):
            moe_a2a.TokenDispatcher(two)
        with pytest.raises(TypeError, match="pass a TwoLevelExpertParallel"):
            moe_a2a.TwoLevelTokenDispatcher(two.local)
        rows, routes = dispatcher.dispatch(x, topk_idx, topk_weights)
        dispatcher.combine(rows, routes)
    if rank == 1:  # closed: nobody is asked
        start = time.monotonic()
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'routes'"):
            dispatcher.combine(rows)
        assert time.monotonic() - start < ranks.slack(8)


@on_device.cpu_only
def test_a_failure_reaches_every_rank_and_the_next_step_is_right(session_seed):
    run((2, 2), failures_program, session_seed)
