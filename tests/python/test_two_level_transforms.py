"""Two-level calls within a transform of torch.func, or under FakeTensorMode, on one rank: refused on every rank.

The words by which the nodes compare their calls were tensors of the transform then, without memory. Under FakeTensorMode a group
skipped their exchange: the other node read the words of this one's next call, and returned the sums of that. In a transform a
backend of PyTorch without its group, the rail of our own backend, failed: the other node waited for its deadline.
"""

import time

import on_device
import pytest
import ranks
import torch
from node_groups import groups, run
from torch._subclasses.fake_tensor import FakeTensorMode
from two_level_batches import batch, sizes

import moe_a2a

pytestmark = [on_device.TESTS, on_device.cpu_only]  # on GPUs the nodes do not compare calls


def of_fake_tensor(function):
    def call(x):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            return function(mode.from_tensor(x))

    return call


def under_fake_mode(function):
    def call(x):
        with FakeTensorMode():
            return function(x)

    return call


TRANSFORMS = {
    "grad": lambda function: torch.func.grad(lambda x: function(x).sum()),
    "vmap": lambda function: lambda x: torch.vmap(function)(torch.stack([x, x])),
    "functionalize": torch.func.functionalize,
    "fake": of_fake_tensor,
    "fake results": under_fake_mode,
}


def program(world, num_nodes, num_local, transform):
    node, rail = groups(num_nodes, num_local)
    if "fake" not in transform:
        rail = rail._get_backend(torch.device("cpu"))
    generator = torch.Generator().manual_seed(world.rank())
    with (
        moe_a2a.TwoLevelCollectives(node, rail, slice_nbytes=1 << 12, timeout=20) as coll,
        moe_a2a.TwoLevelExpertParallel(node, rail, **sizes(world, dtype=torch.float32)) as ep,
    ):
        x, topk_idx, topk_weights = batch(generator, 20, ep.num_experts)
        dispatcher = moe_a2a.TwoLevelTokenDispatcher(ep)

        def exchange(x):
            handle = ep.dispatch(x, topk_idx, topk_weights)
            return ep.combine(handle.recv_x[handle.expert_row_index[: handle.num_routes]], handle)

        def recorded(x):
            rows, routes = dispatcher.dispatch(x, topk_idx, topk_weights)
            return dispatcher.combine(rows, routes)

        for function in (coll.all_reduce, coll.reduce_scatter, coll.all_gather, exchange, recorded):
            expected, start = function(x), time.monotonic()
            if world.rank() == 1:
                with pytest.raises((RuntimeError, TypeError, ValueError, AssertionError)):
                    TRANSFORMS[transform](function)(x)
            else:
                with pytest.raises(moe_a2a.PeerRefusedError):
                    function(x)
            assert time.monotonic() - start < ranks.slack(8), "a rank waited for its deadline"
            assert torch.equal(function(x), expected)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_rank_within_a_transform(transform):
    run((2, 1), program, transform)
