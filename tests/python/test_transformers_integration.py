"""The experts function of transformers, apart from what the families' test covers.

See tiny_experts.py; test_transformers_failures.py has the calls that fail.
"""

# ruff: noqa: E402 (what follows importorskip needs transformers)

import copy

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

transformers = pytest.importorskip("transformers")

from tiny_experts import HIDDEN, TOLERANCE, assert_close, eager, experts_of, on_ranks, random_tokens
from tiny_models import tiny_model
from transformers_sweep import parts_of_a_batch, run_with

import moe_a2a
from moe_a2a.integrations.experts_module import (
    STACKED_PARAMETERS,
    is_experts_module,
    owned_experts,
)
from moe_a2a.integrations.transformers import register, shard_experts

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "nemotron_h"])
def test_full_weights_are_sliced(family):
    models = [tiny_model(family) for _ in range(2)]
    batches = parts_of_a_batch(2, seed=0)
    expected = [run_with(tiny_model(family), "eager", batch) for batch in batches]

    def rank_main(rank, group, experts):
        return run_with(models[rank], experts.name, batches[rank])

    for actual, wanted in zip(on_ranks(2, rank_main), expected, strict=True):
        assert_close(actual, wanted)


@pytest.mark.parametrize("num_experts, num_ranks", [(5, 2), (7, 3), (4, 3), (2, 3), (8, 1)])
@pytest.mark.parametrize("sharded", [False, True])
def test_experts_that_ranks_do_not_divide(num_experts, num_ranks, sharded):
    whole = tiny_model("mixtral", num_local_experts=num_experts, num_hidden_layers=1)
    models = [copy.deepcopy(whole) for _ in range(num_ranks)]

    def rank_main(rank, group, experts):
        if sharded:
            shard_experts(models[rank], group)
        return experts(experts_of(models[rank]), *random_tokens(rank, 9 + rank, num_experts))

    for rank, actual in enumerate(on_ranks(num_ranks, rank_main)):
        tokens = random_tokens(rank, 9 + rank, num_experts)
        assert_close(actual, eager(experts_of(whole), *tokens))


def test_owned_experts_cover_all_once():
    for num_experts in range(1, 20):
        for num_ranks in range(1, 9):
            owned = [owned_experts(num_experts, rank, num_ranks) for rank in range(num_ranks)]
            assert [e for part in owned for e in part] == list(range(num_experts))


def test_shard_experts_frees_the_others():
    model = shard_experts(tiny_model("gpt_oss"), moe_a2a.thread_group(4)[1])
    for name in STACKED_PARAMETERS:
        parameter = getattr(experts_of(model), name, None)
        if parameter is not None:
            assert len(parameter) == 2
            assert parameter.untyped_storage().nbytes() == parameter.nbytes
    shard_experts(model, moe_a2a.thread_group(4)[1])  # a second time changes nothing
    assert len(experts_of(model).down_proj) == 2


def test_shards_of_another_group_are_refused():
    model = tiny_model("mixtral")
    shard_experts(model, moe_a2a.thread_group(4)[0])
    with pytest.raises(ValueError, match="split for rank 0 of 4, this is rank 1 of 4"):
        shard_experts(model, moe_a2a.thread_group(4)[1])
    (alone,) = moe_a2a.thread_group(1)
    with register(alone, name="moe_a2a:alone") as experts, torch.no_grad():
        with pytest.raises(ValueError, match="split for rank 0 of 4, this is rank 0 of 1"):
            experts(experts_of(model), *random_tokens(0, 3))
    del experts_of(model).moe_a2a_split_for
    with pytest.raises(ValueError, match="holds 2 experts, expected all 8 or this rank's 4"):
        shard_experts(model, moe_a2a.thread_group(2)[0])


def test_a_file_of_one_rank_is_not_loaded_by_the_others(tmp_path):
    """Unchecked, a rank takes the experts of another for its own: their names and shapes are the same."""
    whole = tiny_model("mixtral", num_hidden_layers=1)
    models = [copy.deepcopy(whole) for _ in range(2)]

    def rank_main(rank, group, experts):
        model = shard_experts(shard_experts(models[rank], group), group)
        torch.save(model.state_dict(), tmp_path / f"{rank}.pt")
        group.all_gather(None)
        with pytest.raises(ValueError, match=rf"experts of rank {1 - rank} of 2, and this is rank {rank} of 2"):
            model.load_state_dict(torch.load(tmp_path / f"{1 - rank}.pt"))
        for parameter in model.parameters():
            parameter.zero_()
        model = copy.deepcopy(model)
        model.load_state_dict(torch.load(tmp_path / f"{rank}.pt"))
        return experts(experts_of(model), *random_tokens(rank, 9))

    for rank, actual in enumerate(on_ranks(2, rank_main)):
        assert_close(actual, eager(experts_of(whole), *random_tokens(rank, 9)))


@pytest.mark.parametrize("counts", [(0, 7), (7, 0), (0, 0), (1, 40, 0)])
def test_ranks_without_tokens(counts):
    module = experts_of(tiny_model("mixtral"))
    modules = [copy.deepcopy(module) for _ in counts]

    def rank_main(rank, group, experts):
        return experts(modules[rank], *random_tokens(rank, counts[rank]))

    for rank, actual in enumerate(on_ranks(len(counts), rank_main)):
        assert actual.shape == (counts[rank], HIDDEN)
        assert_close(actual, eager(module, *random_tokens(rank, counts[rank])))


def test_masked_routes_add_nothing():
    module = experts_of(tiny_model("mixtral"))
    modules = [copy.deepcopy(module) for _ in range(2)]
    x, topk_idx, topk_weights = random_tokens(0, 12)
    masked = torch.rand(topk_idx.shape, generator=torch.Generator().manual_seed(1)) < 0.4
    marked = topk_idx.masked_fill(masked, 8)
    marked[::2] = marked[::2].masked_fill(masked[::2], -1)

    def rank_main(rank, group, experts):
        return experts(modules[rank], x, marked, topk_weights)

    expected = eager(module, x, topk_idx, topk_weights.masked_fill(masked, 0))
    for actual in on_ranks(2, rank_main):
        assert_close(actual, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights_dtype", [torch.float32, None])
def test_half_precision(dtype, weights_dtype):
    module = experts_of(tiny_model("mixtral").to(dtype))
    modules = [copy.deepcopy(module) for _ in range(2)]

    def tokens_of(rank):
        x, topk_idx, topk_weights = random_tokens(rank, 20, dtype=dtype)
        return x, topk_idx, topk_weights.to(weights_dtype or dtype)

    def rank_main(rank, group, experts):
        return experts(modules[rank], *tokens_of(rank))

    for rank, actual in enumerate(on_ranks(2, rank_main)):
        assert actual.dtype == dtype
        x, topk_idx, topk_weights = tokens_of(rank)
        exact = eager(copy.deepcopy(module).float(), x.float(), topk_idx, topk_weights.float())
        library_error = (eager(module, x, topk_idx, topk_weights).float() - exact).abs().max()
        assert (actual.float() - exact).abs().max() <= 2 * library_error


@pytest.mark.parametrize("intermediate_size", [33, 30])
def test_sizes_that_torch_cannot_group(intermediate_size):
    module = experts_of(tiny_model("mixtral", intermediate_size=intermediate_size))
    modules = [copy.deepcopy(module) for _ in range(2)]

    def rank_main(rank, group, experts):
        return experts(modules[rank], *random_tokens(rank, 10))

    for rank, actual in enumerate(on_ranks(2, rank_main)):
        assert_close(actual, eager(module, *random_tokens(rank, 10)))


def test_buffers_grow_with_the_largest_rank_and_are_shared_by_layers():
    models = [tiny_model("mixtral") for _ in range(2)]
    batches = [torch.arange(3, 3 + length)[None] for length in (4, 70, 3)]
    expected = [run_with(tiny_model("mixtral"), "eager", batch) for batch in batches]
    of_rank = [(0, 0, 2), (0, 1, 2)]

    def rank_main(rank, group, experts):
        capacities = []
        for batch in of_rank[rank]:
            assert_close(run_with(models[rank], experts.name, batches[batch]), expected[batch])
            capacities.append([ep.num_max_tokens_per_rank for ep in experts.expert_parallels])
        return capacities

    assert on_ranks(2, rank_main) == [[[16], [128], [128]]] * 2


def test_close_forgets_the_name():
    model = tiny_model("mixtral")
    (group,) = moe_a2a.thread_group(1)
    with register(group, name="moe_a2a:gone") as experts:
        run_with(model, "moe_a2a:gone", torch.tensor([[3, 4]]))
    experts.close()  # a second close has no effect
    with pytest.raises(ValueError, match="moe_a2a:gone"):
        tiny_model("mixtral").set_experts_implementation("moe_a2a:gone")


def test_models_that_cannot_be_split_are_refused():
    (group,) = moe_a2a.thread_group(1)
    with pytest.raises(ValueError, match="Linear has no experts"):
        shard_experts(torch.nn.Linear(2, 2), group)
    model = tiny_model("mixtral")
    experts_of(model)._is_expert_parallel = True
    with pytest.raises(ValueError, match="expert parallelism"):
        shard_experts(model, group)
    quantised = tiny_model("mixtral").to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="float8_e4m3fn weights"):
        shard_experts(quantised, group)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda module: setattr(module, "has_expert_scale", True), "sets has_expert_scale"),
        (lambda module: setattr(module, "is_shared", True), "sets is_shared"),
        (lambda module: delattr(module, "gate_up_proj"), "has no gate_up_proj"),
        (lambda module: setattr(module, "has_bias", True), "has no gate_up_proj_bias, down_proj_bias"),
    ],
)
def test_experts_of_a_kind_that_is_not_known_are_refused(change, words):
    """A flag that a newer transformers adds would otherwise be ignored, with wrong results."""
    (group,) = moe_a2a.thread_group(1)
    module = experts_of(tiny_model("mixtral"))
    change(module)
    with register(group, name="moe_a2a:unknown") as experts, torch.no_grad():
        for call in (
            lambda: shard_experts(torch.nn.ModuleList([module]), group),
            lambda: experts(module, *random_tokens(0, 3)),
        ):
            with pytest.raises(ValueError, match=f"MixtralExperts {words}"):
                call()


def refuse_distributed_weights(group):
    model = tiny_model("mixtral")
    mesh = DeviceMesh("cpu", [0])
    for module in model.modules():
        if is_experts_module(module):
            module.down_proj = torch.nn.Parameter(distribute_tensor(module.down_proj.detach(), mesh, [Shard(0)]))
    with pytest.raises(ValueError, match="expert parallelism"):
        shard_experts(model, group)


def test_experts_that_transformers_5_17_has_split_are_refused():
    """It sets no flag, but their weights are DTensors."""
    ranks.run_processes(1, refuse_distributed_weights)


def test_experts_of_transformers_5_17():
    """They lack two flags that are newer."""
    model = tiny_model("mixtral")
    batch = torch.tensor([[3, 4, 5]])
    expected = run_with(model, "eager", batch)
    for module in model.modules():
        if is_experts_module(module):
            vars(module).pop("_is_expert_parallel", None)
            vars(module).pop("has_post_expert_norm", None)
    (group,) = moe_a2a.thread_group(1)
    with register(group, name="moe_a2a:5_17"):
        shard_experts(model, group)
        torch.testing.assert_close(run_with(model, "moe_a2a:5_17", batch), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("shards", [True, False], ids=["one_graph", "broken_where_a_module_has_no_number"])
def test_compiled_models(shards):
    model = tiny_model("mixtral")
    (group,) = moe_a2a.thread_group(1)
    batch = torch.arange(3, 9)[None]
    expected = run_with(tiny_model("mixtral"), "eager", batch)
    with register(group, name="moe_a2a:compiled") as experts, torch.no_grad():
        if shards:
            shard_experts(model, group)
        model.set_experts_implementation(experts.name)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=shards)
        logits = compiled(input_ids=batch, use_cache=False).logits
    assert_close(logits, expected)


def test_a_copy_of_a_model_runs_its_own_experts_in_its_graph():
    original = tiny_model("mixtral")
    (group,) = moe_a2a.thread_group(1)
    batch = torch.arange(3, 9)[None]
    with register(group, name="moe_a2a:copied") as experts, torch.no_grad():
        shard_experts(original, group)
        model = copy.deepcopy(original)
        experts_of(model).gate_up_proj.mul_(2)
        for either in (original, model):
            either.set_experts_implementation(experts.name)
        torch._dynamo.reset()
        for fullgraph in (False, True):
            for either in (original, model):
                expected = either(input_ids=batch, use_cache=False).logits
                compiled = torch.compile(either, backend="eager", fullgraph=fullgraph)
                assert_close(compiled(input_ids=batch, use_cache=False).logits, expected)
            shard_experts(model, group)  # gives the copy's modules numbers of their own


def generate(group):
    prompt = torch.arange(3, 9 + 4 * dist.get_rank(group))[None]
    length = {"max_new_tokens": (3, 9)[dist.get_rank(group)], "do_sample": False}
    expected = tiny_model("mixtral").generate(prompt, **length)
    with register(group, timeout=20.0):
        model = shard_experts(tiny_model("mixtral"), group)
        model.set_experts_implementation("moe_a2a")
        tokens = model.generate(prompt, synced_gpus=True, **length)
    return expected.tolist(), tokens.tolist()


def test_generate_with_different_lengths_on_ranks_as_processes():
    for expected, tokens in ranks.run_processes(2, generate, timeout=120):
        assert tokens == expected
