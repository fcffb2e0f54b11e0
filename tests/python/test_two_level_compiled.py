"""Two-level calls under torch.compile(): each breaks the graph.

Dynamo traced their Python code, and failed in it, with an InternalTorchDynamoError: it cannot trace a process group's methods,
nor slices whose bounds depend on a size.
"""

import on_device
import pytest
import torch
from node_groups import groups, run
from two_level_batches import batch, sizes

import moe_a2a

pytestmark = on_device.TESTS


def compiled(function):
    return torch.compile(function, backend="aot_eager")


def program(world, num_nodes, num_local, seed):
    generator = torch.Generator().manual_seed(seed + world.rank())
    node, rail = groups(num_nodes, num_local)
    with (
        moe_a2a.TwoLevelCollectives(node, rail, slice_nbytes=1 << 12, timeout=20) as coll,
        moe_a2a.TwoLevelExpertParallel(node, rail, **sizes(world, dtype=torch.float32)) as ep,
    ):

        def all_reduce(x):
            return coll.all_reduce(x + 1, "avg") * 2

        def reduce_scatter(x):
            return coll.reduce_scatter(x + 1) * 2

        def all_gather(x):
            return coll.all_gather(x + 1) * 2

        for function in (all_reduce, reduce_scatter, all_gather):
            for count in (8, 5000, 6000):  # in the second and third call of a function sizes are symbols
                x = torch.randint(-9, 9, (count,), generator=generator).to(coll.device, torch.float32)
                assert torch.equal(compiled(function)(x), function(x)), (function.__name__, count)

        dispatcher = moe_a2a.TwoLevelTokenDispatcher(ep)

        def exchange(x, topk_idx, topk_weights):
            handle = ep.dispatch(x * 2, topk_idx, topk_weights)
            return ep.combine(handle.recv_x[handle.expert_row_index[: handle.num_routes]], handle) + 1

        def recorded(x, topk_idx, topk_weights):
            rows, routes = dispatcher.dispatch(x * 2, topk_idx, topk_weights)
            return dispatcher.combine(rows * 3, routes) + 1

        x, topk_idx, topk_weights = batch(generator, 20, ep.num_experts)
        assert torch.equal(compiled(exchange)(x, topk_idx, topk_weights), exchange(x, topk_idx, topk_weights))
        grads = []
        for function in (recorded, compiled(recorded)):
            leaf = x.clone().requires_grad_()
            function(leaf, topk_idx, topk_weights).square().sum().backward()
            grads.append(leaf.grad)
        assert torch.equal(*grads)


@pytest.mark.timeout(120)
def test_calls_break_a_graph(session_seed):
    run((2, 1), program, session_seed % 10_000)
