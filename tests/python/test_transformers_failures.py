"""Calls of transformers' experts that fail, on all ranks or on one: every rank raises, and the buffers stay usable."""

import copy
import time

import pytest
import ranks
import torch

pytest.importorskip("transformers")

from tiny_experts import assert_close, eager, experts_of, on_ranks, random_tokens
from tiny_models import tiny_model
from transformers_sweep import run_with

import moe_a2a
from moe_a2a.integrations.experts_module import is_experts_module
from moe_a2a.integrations.transformers import register, shard_experts

pytestmark = pytest.mark.cpu


def test_more_tokens_than_registered():
    module = experts_of(tiny_model("mixtral"))
    modules = [copy.deepcopy(module) for _ in range(2)]

    def rank_main(rank, group, experts):
        with pytest.raises((ValueError, moe_a2a.PeerRefusedError), match="num_max_tokens_per_rank"):
            experts(modules[rank], *random_tokens(rank, (3, 9)[rank]))
        return experts(modules[rank], *random_tokens(rank, 8))

    for rank, actual in enumerate(on_ranks(2, rank_main, num_max_tokens_per_rank=8)):
        assert_close(actual, eager(module, *random_tokens(rank, 8)))


def test_ranks_in_different_layers_find_out():
    models = [tiny_model("mixtral") for _ in range(2)]

    def rank_main(rank, group, experts):
        shard_experts(models[rank], group)
        layers = [module for module in models[rank].modules() if is_experts_module(module)]
        with pytest.raises(RuntimeError, match=r"is in layer .*layers\.\d\.mlp\.experts"):
            experts(layers[rank], *random_tokens(rank, 4))

    on_ranks(2, rank_main)


def test_gradients_are_refused():
    models = [tiny_model("mixtral") for _ in range(2)]
    batch = torch.arange(3, 8)[None]

    def rank_main(rank, group, experts):
        models[rank].set_experts_implementation(experts.name)
        with torch.enable_grad(), pytest.raises(RuntimeError, match="no_grad"):
            models[rank](input_ids=batch)
        models[rank].requires_grad_(False)
        with torch.enable_grad():
            return models[rank](input_ids=batch).logits

    for logits in on_ranks(2, rank_main):
        assert_close(logits, run_with(tiny_model("mixtral"), "eager", batch))


@pytest.mark.parametrize("num_max_tokens_per_rank", [8, None])
def test_a_call_that_one_rank_cannot_make(num_max_tokens_per_rank):
    """The others must not wait until their deadline, nor lose the buffers."""
    layer = experts_of(tiny_model("mixtral"))

    def rank_main(rank, group, experts):
        tokens = random_tokens(rank, 8)
        for _ in range(2):  # as the first call, which makes the buffers, and as a later one
            start = time.monotonic()
            with torch.set_grad_enabled(rank == 0), pytest.raises(RuntimeError, match="moe_a2a has no backward pass"):
                experts(layer, *tokens)
            assert time.monotonic() - start < ranks.slack(5)
            out = experts(layer, *tokens)
        return out

    for rank, out in enumerate(on_ranks(2, rank_main, num_max_tokens_per_rank=num_max_tokens_per_rank)):
        assert_close(out, eager(layer, *random_tokens(rank, 8)))


MALFORMED = {
    "a batch of sequences": (lambda x, idx, weights: (x[None], idx, weights), r"hidden_states has shape \[1, 8, 64\]"),
    "ids in one dimension": (lambda x, idx, weights: (x, idx[:, 0], weights), r"top_k_index has shape \[8\]"),
    "no weights": (lambda x, idx, weights: (x, idx, None), "top_k_weights is a NoneType"),
    "a list": (lambda x, idx, weights: (x.tolist(), idx, weights), "hidden_states is a list"),
}


@pytest.mark.parametrize("num_max_tokens_per_rank", [8, None])
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_arguments_of_one_rank(name, num_max_tokens_per_rank):
    """Not "too many values to unpack" and the like on this rank, while the others wait until their deadline."""
    malformed, words = MALFORMED[name]
    layer = experts_of(tiny_model("mixtral"))

    def rank_main(rank, group, experts):
        tokens = random_tokens(rank, 8)
        experts(layer, *tokens)
        with pytest.raises(
            (ValueError, TypeError) if rank == 0 else moe_a2a.PeerRefusedError, match=f"{words} on rank 0"
        ):
            experts(layer, *(malformed(*tokens) if rank == 0 else tokens))
        return experts(layer, *tokens)

    for rank, out in enumerate(on_ranks(2, rank_main, num_max_tokens_per_rank=num_max_tokens_per_rank)):
        assert_close(out, eager(layer, *random_tokens(rank, 8)))


@pytest.mark.parametrize("num_max_tokens_per_rank", [8, None])
def test_ids_that_one_rank_cannot_compare(num_max_tokens_per_rank):
    """Regression: what fails between the checks and the dispatch, as PyTorch does here, was not told to the others."""
    layer = experts_of(tiny_model("mixtral"))

    def rank_main(rank, group, experts):
        x, ids, weights = tokens = random_tokens(rank, 8)
        experts(layer, *tokens)
        with pytest.raises(RuntimeError if rank == 0 else moe_a2a.PeerRefusedError, match="UInt32"):
            experts(layer, x, ids.to(torch.uint32) if rank == 0 else ids, weights)
        return experts(layer, *tokens)

    for rank, out in enumerate(on_ranks(2, rank_main, num_max_tokens_per_rank=num_max_tokens_per_rank)):
        assert_close(out, eager(layer, *random_tokens(rank, 8)))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("num_max_tokens_per_rank", 0),
        ("num_max_tokens_per_rank", 8.0),
        ("timeout", "x"),
        ("timeout", 0),
        ("fused", "no"),
    ],
)
def test_options_are_checked_when_they_are_given(option, value):
    """Not by the first layer that uses them."""
    (group,) = moe_a2a.thread_group(1)
    with pytest.raises((ValueError, TypeError), match=f"{option}={value!r}.* rank 0"):
        register(group, name="moe_a2a:unused", **{option: value})


def test_a_rank_that_never_calls_is_named_within_the_timeout():
    """The timeout of the group's collectives is far longer."""
    layer = experts_of(tiny_model("mixtral"))

    def rank_main(rank, group, experts):
        experts.timeout = 1.0
        if rank == 0:
            with pytest.raises(
                moe_a2a.PeerTimeoutError, match="rank 0 waited .* for rank 1 to agree on the size of a layer's"
            ):
                experts(layer, *random_tokens(rank, 8))

    on_ranks(2, rank_main)


@pytest.mark.parametrize(
    ("ranks_that_fail", "num_calls"),
    [
        ((0, 1), 3),  # more often than there are buffers
        ((0,), 1),
    ],
)
def test_an_error_in_the_experts_leaves_the_buffers_usable(ranks_that_fail, num_calls):
    module = experts_of(tiny_model("mixtral"))
    modules = [copy.deepcopy(module) for _ in range(2)]

    def fail(x):
        raise ArithmeticError("on purpose")

    def rank_main(rank, group, experts):
        fails = rank in ranks_that_fail
        with pytest.MonkeyPatch.context() as patch:
            if fails:
                patch.setattr(modules[rank], "_apply_gate", fail)
            for _ in range(num_calls):
                with pytest.raises(ArithmeticError if fails else moe_a2a.PeerRefusedError, match="on purpose"):
                    experts(modules[rank], *random_tokens(rank, 5))
        return experts(modules[rank], *random_tokens(rank, 5))

    for rank, actual in enumerate(on_ranks(2, rank_main)):
        assert_close(actual, eager(module, *random_tokens(rank, 5)))


def test_a_combine_that_one_rank_cannot_make_leaves_the_buffers_usable():
    """Regression: a traceback that somebody keeps held a buffer on some ranks only, and none was left after two errors."""
    module = experts_of(tiny_model("mixtral"))
    modules = [copy.deepcopy(module) for _ in range(2)]

    def rank_main(rank, group, experts):
        own, kept = modules[rank], []
        own.has_post_expert_norm, own.post_expert_norm = rank == 0, lambda y: y[:, 1:]
        for _ in range(3):
            with pytest.raises(ValueError if rank == 0 else moe_a2a.PeerRefusedError, match="y has shape") as raised:
                experts(own, *random_tokens(rank, 5))
            kept.append(raised)
        own.has_post_expert_norm = False
        return experts(own, *random_tokens(rank, 5))

    for rank, actual in enumerate(on_ranks(2, rank_main)):
        assert_close(actual, eager(module, *random_tokens(rank, 5)))


def test_a_batch_that_needs_too_much_memory_leaves_smaller_ones():
    """The buffers that were to grow are open again for later calls."""
    module = experts_of(tiny_model("mixtral"))
    modules = [copy.deepcopy(module) for _ in range(2)]

    def no_memory(group, **sizes):
        raise MemoryError(f"for {sizes['num_max_tokens_per_rank']} tokens")

    def rank_main(rank, group, experts):
        experts(modules[rank], *random_tokens(rank, 8))
        group.all_gather(None)
        with pytest.MonkeyPatch.context() as patch:
            if rank == 0:  # the ranks are threads
                patch.setattr(moe_a2a, "ExpertParallel", no_memory)
            group.all_gather(None)
            with pytest.raises(MemoryError, match="for 64 tokens"):
                experts(modules[rank], *random_tokens(rank, 40))
            group.all_gather(None)
        group.all_gather(None)
        return experts(modules[rank], *random_tokens(rank, 8))

    for rank, actual in enumerate(on_ranks(2, rank_main)):
        assert_close(actual, eager(module, *random_tokens(rank, 8)))


def test_a_sharded_model_is_not_saved_as_a_whole_one(tmp_path):
    """Each rank saved its own experts as the checkpoint of a whole model, into the folder that the others used too."""
    whole = tiny_model("mixtral")
    models = [copy.deepcopy(whole) for _ in range(2)]

    def rank_main(rank, group, experts):
        folder = tmp_path / str(rank)
        for model in (shard_experts(models[rank], group), copy.deepcopy(models[rank])):
            with pytest.raises(
                RuntimeError, match=rf"of rank {rank} holds this rank's experts only; call save_pretrained\(\) before"
            ):
                model.save_pretrained(folder)
            assert not folder.exists()
        models[rank].save_pretrained(folder, state_dict=whole.state_dict())
        loaded = type(whole).from_pretrained(folder).state_dict()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in whole.state_dict().items())

    on_ranks(2, rank_main)
