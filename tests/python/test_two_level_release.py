"""A rank of several nodes releases a dispatch that the others combine.

Before, only its own node was told. The ranks of other nodes waited for its part until their deadline, and the object was
lost on every rank.
"""

import random
import time

import on_device
import pytest
import ranks
import torch
from test_two_level import groups, run
from test_two_level_experts import K, T, batch, scaled_rows, sizes

import moe_a2a

pytestmark = on_device.TESTS

LEARNT = (moe_a2a.CallMismatchError, moe_a2a.PeerRefusedError)


def program_of(world, num_nodes, num_local, seed, check):
    """check(two, step, works): step() dispatches, works() compares a whole call with the first one's result."""
    generator = torch.Generator().manual_seed(1000 * seed + world.rank())
    with moe_a2a.TwoLevelExpertParallel(
        *groups(num_nodes, num_local), **sizes(world, dtype=torch.float32, num_buffers=3)
    ) as two:
        x, _, topk_weights = batch(generator, T, two.num_experts)
        # Every rank needs every other.
        topk_idx = torch.arange(T * K).view(T, K) % two.num_experts

        def step():
            return two.dispatch(x, topk_idx, topk_weights)

        def combined(handle):
            return two.combine(scaled_rows(handle, two.rank * two.num_local_experts), handle)

        expected = combined(step())
        check(two, step, combined, lambda: torch.equal(combined(step()), expected), random.Random(seed))


def one_releases(two, step, combined, works, choose):
    for _ in range(6):
        releasing = choose.sample(range(two.num_ranks), choose.choice([1, 1, 2]))
        handle, start = step(), time.monotonic()
        if two.rank in releasing:
            handle.release()
        else:
            with pytest.raises(LEARNT, match="the release of dispatch|refused its call|failed on its node"):
                combined(handle)
        assert time.monotonic() - start < ranks.slack(8), releasing
        assert not handle.is_open and works(), releasing


def nobody_combines(two, step, combined, works, choose):
    """Then it does not matter who releases, when, or in which order."""
    for _ in range(6):
        handles = [step() for _ in range(3)]
        choose.shuffle(handles)  # alike on every rank
        kept, *others = handles
        for handle in others if two.rank % 2 else reversed(others):
            handle.release()
            handle.release()
        assert works()
        if choose.random() < 0.5:
            combined(kept)
        elif choose.random() < 0.5 or two.node == 0:
            kept.release()
        assert works()
        if kept.is_open:
            kept.release()


def dispatchers(two, step, combined, works, choose):
    dispatcher = moe_a2a.TwoLevelTokenDispatcher(two)
    x = torch.ones(T, two.hidden)
    topk_idx = torch.arange(T * K).view(T, K) % two.num_experts

    def passes():
        with torch.no_grad():
            return dispatcher.combine(*dispatcher.dispatch(x, topk_idx))

    expected = passes()
    for releasing in range(two.num_ranks):
        start = time.monotonic()
        with torch.no_grad():
            rows, routes = dispatcher.dispatch(x, topk_idx)
            if two.rank == releasing:
                routes.release()
            else:
                with pytest.raises(LEARNT):
                    dispatcher.combine(rows, routes)
        assert time.monotonic() - start < ranks.slack(8), releasing
        assert torch.equal(passes(), expected), releasing


@on_device.cpu_only
@pytest.mark.parametrize("split", [(2, 2), (3, 1)])
@pytest.mark.parametrize("check", [one_releases, nobody_combines, dispatchers])
def test_release(check, split, session_seed):
    run(split, program_of, session_seed % 10_000, check)
