"""The loss curve of a model with a MoELayer on several ranks is that of one process with all tokens and experts.

The choices of experts are part of the data. If the router chose, a last bit of rounding would decide between experts
with nearly equal probabilities, and from there on the two runs would train different experts.
"""

import pytest
import ranks
import torch
from gradients import HIDDEN, make_weights, own_part
from torch import nn

import moe_a2a

pytestmark = pytest.mark.cpu

NUM_EXPERTS, NUM_TOPK = 8, 2


class Model(nn.Module):
    """[tokens, HIDDEN], [tokens, num_topk] -> [tokens, 4]. experts: (x, topk_idx, topk_weights) -> [tokens, HIDDEN]."""

    def __init__(self, experts, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.inner, self.router = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, NUM_EXPERTS, bias=False)
        self.head = nn.Linear(HIDDEN, 4)
        self.experts = experts

    def forward(self, x, topk_idx):
        x = self.inner(x).tanh()
        topk_weights = self.router(x).softmax(-1).gather(1, topk_idx)
        return self.head(x + self.experts(x, topk_idx, topk_weights))


def data_of(rank, step, seed):
    generator = torch.Generator().manual_seed(seed + 100 * (step % 2) + rank)
    x = torch.randn(8 + rank, HIDDEN, generator=generator)
    topk_idx = torch.rand(8 + rank, NUM_EXPERTS, generator=generator).topk(NUM_TOPK).indices
    return x, topk_idx, x[:, :4] * x[:, 4:8]


def train(model, params, batches_of, num_tokens, reduce, num_steps=20):
    """The loss of each step. reduce: adds over the ranks."""
    optimizer = torch.optim.Adam(params, lr=0.01)
    losses = []
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = sum((model(x, topk_idx) - y).square().sum() for x, topk_idx, y in batches_of(step)) / num_tokens
        loss.backward()
        for dense in (model.inner, model.router, model.head):
            for p in dense.parameters():
                reduce(p.grad)
        optimizer.step()
        total = loss.detach().clone()
        reduce(total)
        losses.append(total.item())
    return losses


def run_training(group, seed):
    num_ranks, rank = group.size(), group.rank()
    num_tokens = sum(8 + r for r in range(num_ranks))
    with moe_a2a.ExpertParallel(
        group,
        num_experts=NUM_EXPERTS,
        num_topk=NUM_TOPK,
        hidden=HIDDEN,
        num_max_tokens_per_rank=16,
        dtype=torch.float32,
        device="cpu",
    ) as ep:
        weights = make_weights(ep, seed)
        layer = moe_a2a.MoELayer(ep, *(nn.Parameter(w) for w in own_part(ep, weights)))
        model = Model(layer, seed)
        ours = train(
            model,
            list(model.parameters()),
            lambda step: [data_of(rank, step, seed)],
            num_tokens,
            lambda tensor: torch.distributed.all_reduce(tensor, group=group),
        )
    all_weights = [nn.Parameter(w) for w in weights]
    alone = Model(lambda *tokens: moe_a2a.reference.moe_layer(*tokens, *all_weights), seed)
    expected = train(
        alone,
        [*alone.parameters(), *all_weights],
        lambda step: [data_of(r, step, seed) for r in range(num_ranks)],
        num_tokens,
        lambda tensor: None,
    )
    return ours, expected


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_model_learns_as_in_one_process(num_ranks, session_seed):
    for ours, expected in ranks.run_processes(num_ranks, run_training, session_seed, timeout=120):
        torch.testing.assert_close(ours, expected, rtol=2e-5, atol=1e-6)
        assert ours[-1] < 0.8 * ours[0], ours
