"""PyTorch's defaults, as frameworks set them while they load a model, change nothing: tensors of the package's own have their dtype
and device whatever the defaults are."""

import ast
import contextlib
from pathlib import Path

import node_groups
import on_device
import pytest
import ranks
import torch
import torch.distributed as dist
from deep_ep_cases import EXPERTS_PER_RANK, TOPK, batches
from small_calls import CONFIG, make_inputs

import moe_a2a
from moe_a2a.integrations.deep_ep import Buffer, HybridEPBuffer
from moe_a2a.integrations.deep_ep.routing_map import indices_to_map

pytestmark = pytest.mark.cpu

PACKAGE = Path(moe_a2a.__file__).parent
# These make their inputs, in processes of their own.
COMMANDS = ["bench", "demo", "leaderboard", "doctor.py"]
OF_DEFAULT_DTYPE = {"empty", "zeros", "ones", "rand", "randn", "linspace"}
OF_DEFAULT_DEVICE = {*OF_DEFAULT_DTYPE, "full", "arange", "tensor", "as_tensor", "randint", "randperm", "eye"}
NEEDED = {"dtype": OF_DEFAULT_DTYPE, "device": OF_DEFAULT_DEVICE}


@contextlib.contextmanager
def defaults(dtype, device):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def test_every_tensor_has_a_dtype_and_a_device():
    """Regressions: low_latency_dispatch() with a hook and use_fp8 rounded the scales to bfloat16, if that was the default. The end
    of a trace added tensors of the CPU to one of the default device."""
    missing = []
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] in COMMANDS:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not (name := ast.unparse(node.func)).startswith("torch."):
                continue
            name, keywords = name.removeprefix("torch."), {keyword.arg for keyword in node.keywords}
            needed = {word for word, names in NEEDED.items() if name in names}
            if None not in keywords and not needed <= keywords:
                missing.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}")
    assert not missing


def traced(group):
    with moe_a2a.ExpertParallel(group, **CONFIG, device="cpu") as ep:
        x, topk_idx, weights = make_inputs(ep)
        with torch.device("meta"), moe_a2a.trace(ep) as trace:
            ep.dispatch(x, topk_idx, weights).release()
        num_routes = group.all_gather(int((topk_idx >= 0).sum()))
        assert sum(trace.timeline.about["tokens_per_expert"]) == sum(num_routes)


def test_of_a_trace():
    """Regression: its end raised, under a default device that is not the CPU, and the trace was lost."""
    ranks.run_threads(2, traced)


def two_levels(world, seed):
    nodes = node_groups.groups(2, 1)
    sizes = {"num_experts": 4, "num_topk": 2, "hidden": 16, "num_max_tokens_per_rank": 8, "dtype": torch.float32}
    generator = torch.Generator().manual_seed(seed)
    x, weights = torch.randn(8, 16, generator=generator), torch.rand(8, 2, generator=generator)
    topk_idx = torch.randint(0, 4, (8, 2), generator=generator)
    with torch.device("meta"), moe_a2a.TwoLevelExpertParallel(*nodes, **sizes, device="cpu") as ep:
        handle = ep.dispatch(x, topk_idx, weights)
        out = ep.combine(handle.recv_x[handle.expert_row_index[: handle.num_routes]], handle)
    torch.testing.assert_close(out, x * weights.sum(1, keepdim=True))


def test_of_two_levels(session_seed):
    ranks.run_processes(2, two_levels, session_seed)


def test_of_the_map_of_survivors():
    with torch.device("meta"):
        table = moe_a2a.expert_map([1], num_ranks=2, num_experts=4, device="cpu")
    assert table.tolist() == [-1, -1, 0, 1, -1]


def low_latency(buffer, x, ids, weights):
    (values, scales), counts, handle, _, hook = buffer.low_latency_dispatch(
        x, ids, 64, 2 * EXPERTS_PER_RANK, return_recv_hook=True
    )
    hook()
    is_row = torch.arange(values.shape[1], device="cpu") < counts[:, None]
    y = (values.float() * scales.repeat_interleave(128, 2)).masked_fill_(~is_row[:, :, None], 0).bfloat16()
    sums, *_ = buffer.low_latency_combine(y, ids, weights, handle)
    return scales[is_row], counts, sums


def hybrid(buffer, x, ids, weights):
    routing_map, probs = indices_to_map(ids, weights, len(ids), 2 * EXPERTS_PER_RANK)
    rows, probs, _, tokens_per_expert, handle = buffer.dispatch_with_permute(
        hidden=x, routing_map=routing_map, probs=probs
    )
    return rows, probs, tokens_per_expert, *buffer.combine_with_unpermute(hidden=rows, probs=probs, handle=handle)


def results(group, everything):
    x, ids, weights = everything[group.rank]
    x = x / 3  # scales that bfloat16 does not hold
    found = []
    for buffer, call in (
        (Buffer(group, timeout=ranks.slack(10)), low_latency),
        (HybridEPBuffer(group, x.shape[1], 64, EXPERTS_PER_RANK, num_topk=TOPK), hybrid),
    ):
        found += call(buffer, x, ids, weights)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_of_deep_ep(dtype, device):
    def program(group):
        with torch.device(device):  # of this thread
            return results(group, everything)

    everything = batches(2, 0, dtype=torch.bfloat16)
    expected = ranks.run_threads(2, results, everything)
    with defaults(dtype, "cpu"):
        found = ranks.run_threads(2, program)
    for a, b in zip(sum(expected, []), sum(found, []), strict=True):
        assert (a.dtype, a.device) == (b.dtype, b.device)
        assert torch.equal(a, b)


def backend_program(world):
    group = dist.new_group(backend="moe_a2a")
    with defaults(torch.float64, "meta"):
        dist.barrier(group)
    dist.destroy_process_group(group)


@on_device.cpu_only
def test_barrier_of_the_torch_backend():
    """Regression: x has dtype torch.float64 on rank 0; expected float32, float16 or bfloat16."""
    ranks.run_processes(2, backend_program)
