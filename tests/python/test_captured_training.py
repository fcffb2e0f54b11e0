"""A training step in a captured graph: dispatch, experts and combine, and their backward passes, replayed with new batches."""

import on_device
import pytest
import torch
from gradients import MAX_TOKENS, make_ep
from test_token_dispatcher import Rank, multiply_grouped
from torch.utils.checkpoint import checkpoint

import moe_a2a

pytestmark = [on_device.TESTS, on_device.gpu_only]

NUM_REPLAYS = 30


class CapturedRank(Rank):
    """The tensors of a graph: renew() fills them with those of another batch and other weights."""

    def __init__(self, ep, seed):
        super().__init__(ep, seed, "full")
        self.num_max_routes = ep.num_ranks * MAX_TOKENS * ep.num_topk

    def step(self, recomputes):
        for tensor in self.leaves.values():
            tensor.grad = None

        def forward(x):
            return self.forward(x, experts=multiply_grouped, num_max_routes=self.num_max_routes)

        x = self.leaves["x"]
        self.out = checkpoint(forward, x, use_reentrant=False) if recomputes else forward(x)
        self.out.backward(self.grad_out)

    @torch.no_grad()
    def renew(self, seed):
        other = Rank(self.ep, seed, "full", dispatcher=self.dispatcher)
        for name, tensor in self.leaves.items():
            tensor.copy_(other.leaves[name])
        self.topk_idx.copy_(other.topk_idx)
        self.grad_out.copy_(other.grad_out)
        self.batches, self.weights = other.batches, other.weights


@pytest.mark.parametrize("recomputes", [False, True])
def test_replays_have_the_gradients_of_one_process(recomputes, session_seed):
    def program(group):
        with make_ep(group, torch.bfloat16) as ep:
            rank = CapturedRank(ep, session_seed)
            graph, _ = on_device.capture(lambda: rank.step(recomputes))
            for replay in range(NUM_REPLAYS):
                rank.renew(session_seed + replay)
                graph.replay()
                rank.check()

    on_device.run(on_device.most_ranks(), program, timeout=120)


def test_rows_that_do_not_fit_are_left_out(session_seed):
    def program(group):
        with make_ep(group, torch.bfloat16) as ep:
            rank = Rank(ep, session_seed, "full")
            rows, routes = rank.dispatcher.dispatch(
                rank.leaves["x"], rank.topk_idx, rank.leaves["topk_weights"], num_max_routes=5
            )
            assert len(rows) == routes.expert_offsets.max() == 5  # no product may read past the rows
            rank.dispatcher.combine(rows, routes)
            with pytest.raises(moe_a2a.RoutingError):
                ep.check()

    on_device.run(on_device.most_ranks(), program)
