"""The experts of a tiny model of transformers on ranks that are threads, for the tests of the integration. `eager` in one
process, with all experts, is the reference."""

import torch
from transformers_sweep import on_threads

import moe_a2a
from moe_a2a.integrations.experts_module import is_experts_module
from moe_a2a.integrations.transformers import register

TOLERANCE = 1e-5
HIDDEN = 64


def on_ranks(num_ranks, rank_main, **options):
    """rank_main(rank, group, experts) on a thread per rank, each with its own registered name."""
    groups = moe_a2a.thread_group(num_ranks)

    def main(rank):
        with torch.no_grad():
            name = f"moe_a2a:{rank}"
            with register(groups[rank], name=name, timeout=10.0, **options) as experts:
                return rank_main(rank, groups[rank], experts)

    return on_threads(num_ranks, main)


def experts_of(model):
    return next(module for module in model.modules() if is_experts_module(module))


def random_tokens(rank, num_tokens, num_experts=8, num_topk=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    return (
        torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype),
        torch.rand(num_tokens, num_experts, generator=generator).topk(num_topk).indices,
        torch.rand(num_tokens, num_topk, generator=generator),
    )


def eager(module, *tokens):
    module.config._experts_implementation = "eager"
    with torch.no_grad():
        return module(*tokens)


def assert_close(actual, expected, tolerance=TOLERANCE):
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)
