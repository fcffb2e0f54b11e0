"""grouped_gemm() against the same product in fp64: any routing, any sizes."""

import subprocess
import sys

import numpy as np
import on_device
import pytest
import torch
import torch.nn.functional as F
from gemm_cases import DEVICE, FEW_AND_MANY, ROUTINGS, gathered, make_case

import moe_a2a

pytestmark = [on_device.TESTS, pytest.mark.usefixtures("fresh_memory_is_poisoned")]

DTYPES = [torch.bfloat16, torch.float16]
# [hidden, columns per half]: the smallest, tails of every kind, larger than a tile
SIZES = [(16, 16), (48, 80), (208, 144), (320, 272), (1040, 528)]


def in_torch(x, row_index, expert_offsets, w, activation, dtype):
    """The same in PyTorch, in `dtype`, on the CPU."""
    x, w = x.cpu(), w.cpu().to(dtype)
    rows = gathered(x, None if row_index is None else row_index.cpu()).to(dtype)
    out = []
    for expert, (start, end) in enumerate(torch.stack([expert_offsets[:-1], expert_offsets[1:]], 1).tolist()):
        y = rows[start:end] @ w[expert].t()
        if activation == "swiglu":
            gate, up = y.chunk(2, dim=-1)
            y = F.silu(gate) * up
        out.append(y)
    return torch.cat(out)


def assert_as_exact_as_torch(out, case, activation):
    """At most twice the error of PyTorch in the same dtype, both against fp64."""
    exact = in_torch(*case, activation, torch.float64)
    torchs = (in_torch(*case, activation, case[0].dtype).double() - exact).norm()
    ours = (out.cpu().double() - exact).norm()
    assert ours <= 2 * torchs, f"error {ours}, PyTorch's own {torchs}"


@pytest.mark.parametrize("activation", [None, "swiglu"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("gather", [True, False], ids=["gathered", "in_place"])
def test_any_routing(counts, dtype, activation, gather, session_seed):
    case = make_case(counts, 208, 144, dtype, session_seed, gather)
    out = moe_a2a.grouped_gemm(*case, activation)
    assert out.dtype == dtype and list(out.shape) == [sum(counts), 144 if activation else 288]
    assert_as_exact_as_torch(out, case, activation)


# From models: the functions of Mixtral, Gemma and Nemotron; clamped as in GLM and DeepSeek-V4, shifted as in MiniMax;
# interleaved rows and biases as in GPT-OSS.
EPILOGUES = {
    "bias": {"bias": True},
    "relu2": {"activation": "relu2"},
    "gelu and bias": {"activation": "gelu", "bias": True},
    "silu": {"activation": "silu"},
    "gated by gelu": {"activation": "gelu", "gated": True},
    "gated by gelu_tanh": {"activation": "gelu_tanh", "gated": True},
    "gated alone": {"gated": True},
    "interleaved": {"activation": "swiglu", "interleaved": True},
    "swiglu and bias": {"activation": "swiglu", "bias": True},
    "clamped": {"activation": "swiglu", "limit": 0.75},
    "shifted": {"activation": "swiglu", "limit": 1.5, "alpha": 1.702, "up_shift": 1.0},
    "GPT-OSS": {
        "activation": "swiglu",
        "interleaved": True,
        "limit": 1.5,
        "alpha": 1.702,
        "up_shift": 1.0,
        "bias": True,
    },
}


def epilogue_in_torch(sums, activation=None, gated=False, interleaved=False, alpha=1.0, limit=None, up_shift=0.0):
    functions = {
        None: lambda x: x,
        "silu": lambda x: x * torch.sigmoid(alpha * x),
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "relu2": lambda x: F.relu(x).square(),
    }
    if activation != "swiglu" and not gated:
        return functions[activation](sums)
    gate, up = (sums[:, ::2], sums[:, 1::2]) if interleaved else sums.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return functions["silu" if activation == "swiglu" else activation](gate) * (up + up_shift)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(16, 16), (208, 144), (320, 272)], ids=str)
@pytest.mark.parametrize("epilogue", EPILOGUES.values(), ids=EPILOGUES)
def test_any_epilogue(epilogue, size, dtype, session_seed):
    """At most twice the error of the same sums, activated in fp64 and rounded."""
    hidden, columns = size
    case = make_case(ROUTINGS["random"], hidden, columns, dtype, session_seed)
    epilogue = dict(epilogue)
    bias = torch.randn(len(case[3]), 2 * columns) if epilogue.pop("bias", False) else None
    out = moe_a2a.grouped_gemm(*case, **epilogue, bias=None if bias is None else bias.to(DEVICE))
    sums = in_torch(*case, None, torch.float64)
    if bias is not None:
        sums += bias.double().repeat_interleave(case[2].cpu().diff(), dim=0)
    exact = epilogue_in_torch(sums, **epilogue)
    assert list(out.shape) == list(exact.shape)
    rounded = (exact.to(dtype).double() - exact).norm()
    assert (out.cpu().double() - exact).norm() <= 2 * rounded


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu2"])
def test_large_sums_and_nan_pass_as_in_torch(activation):
    values = torch.tensor([-1e30, -1e4, -80.0, -1.0, -0.0, 1.0, 80.0, 1e4, 1e30, float("nan"), float("inf")])
    x = torch.zeros(len(values), 16, dtype=torch.bfloat16)
    x[:, 0] = values.bfloat16()
    w = torch.zeros(1, 16, 16, dtype=torch.bfloat16)
    w[0, :, 0] = 1
    offsets = torch.tensor([0, len(values)], dtype=torch.int32)
    x[-2:, 0] = 0  # NaN and infinity times the zeros of w would be NaN in every column
    bias = torch.zeros(1, 16)
    out = moe_a2a.grouped_gemm(x.to(DEVICE), None, offsets.to(DEVICE), w.to(DEVICE), activation, bias=bias.to(DEVICE))
    expected = epilogue_in_torch(x.double()[:, :1], activation).bfloat16()
    torch.testing.assert_close(out[:, :1].cpu(), expected, rtol=0.01, atol=1e-30)
    for value in (float("nan"), float("inf")):
        out = moe_a2a.grouped_gemm(
            x.to(DEVICE), None, offsets.to(DEVICE), w.to(DEVICE), activation, bias=(bias + value).to(DEVICE)
        )
        expected = epilogue_in_torch(x[-1:].double() + value, activation).bfloat16()
        assert torch.equal(out[-1, :1].cpu().nan_to_num(7), expected[0, :1].nan_to_num(7))


@pytest.mark.parametrize("activation", [None, "swiglu"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_any_size(size, activation, session_seed):
    case = make_case(ROUTINGS["random"], *size, torch.bfloat16, session_seed)
    assert_as_exact_as_torch(moe_a2a.grouped_gemm(*case, activation), case, activation)


def test_the_comparison_sees_one_wrong_row(session_seed):
    case = make_case(ROUTINGS["random"], 48, 80, torch.bfloat16, session_seed)
    wrong = [t.clone() for t in case]
    wrong[1][40] = (wrong[1][40] + 1) % case[0].shape[0]
    with pytest.raises(AssertionError, match="error"):
        assert_as_exact_as_torch(moe_a2a.grouped_gemm(*wrong), case, None)


@pytest.mark.parametrize("gather", [True, False], ids=["gathered", "in_place"])
def test_rows_may_lie_apart(gather, session_seed):
    """As in recv_x, whose rows are padded to whole lines."""
    x, *rest = make_case(ROUTINGS["random"], 208, 144, torch.bfloat16, session_seed, gather)
    padded = torch.full((x.shape[0], 256), float("nan"), dtype=x.dtype, device=DEVICE)
    padded[:, :208] = x
    assert torch.equal(moe_a2a.grouped_gemm(padded[:, :208], *rest), moe_a2a.grouped_gemm(x, *rest))


def test_lists_may_be_longer_than_the_routing(session_seed):
    """Neither rows of x nor entries of row_index past the last expert's positions are read."""
    x, row_index, offsets, w = make_case(ROUTINGS["random"], 48, 80, torch.bfloat16, session_seed)
    longer = torch.cat([row_index, torch.full((77,), 1 << 30, dtype=torch.int32, device=DEVICE)])
    out = moe_a2a.grouped_gemm(x, longer, offsets, w)
    assert list(out.shape) == [row_index.shape[0] + 77, 160]
    assert torch.equal(out[:-77], moe_a2a.grouped_gemm(x, row_index, offsets, w))


def test_same_inputs_same_bits(session_seed):
    case = make_case(ROUTINGS["random"], 320, 272, torch.bfloat16, session_seed)
    first = moe_a2a.grouped_gemm(*case, "swiglu")
    for _ in range(5):
        assert torch.equal(moe_a2a.grouped_gemm(*case, "swiglu"), first)
    for num_blocks in (2, 6, np.int64(1000), 100_000):  # the last: more threads than a process may have
        assert torch.equal(moe_a2a.grouped_gemm(*case, "swiglu", num_blocks=num_blocks), first)


@pytest.mark.parametrize(
    "epilogue", [{}, {"activation": "swiglu"}, EPILOGUES["GPT-OSS"]], ids=["sums", "swiglu", "GPT-OSS"]
)
@pytest.mark.parametrize("gather", [True, False], ids=["gathered", "in_place"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_others(dtype, gather, epilogue, session_seed):
    """The same bits, whether its expert has few rows or many."""
    x, row_index, offsets, w = make_case(FEW_AND_MANY, 320, 272, dtype, session_seed, gather)
    bias = torch.randn(1, 2 * 272, device=DEVICE) if epilogue.get("bias") else None
    experts = w[:1].expand(len(w), -1, -1).contiguous()
    apart = moe_a2a.grouped_gemm(
        x,
        row_index,
        offsets,
        experts,
        **{**epilogue, "bias": None if bias is None else bias.expand(len(w), -1).contiguous()},
    )
    assert torch.equal(apart, moe_a2a.grouped_gemm(x, row_index, offsets[[0, -1]], w[:1], **{**epilogue, "bias": bias}))


@pytest.mark.parametrize("num_blocks", [-1, 1 << 31, True, 2.0, "2", None])
def test_bad_num_blocks_are_refused(num_blocks, session_seed):
    case = make_case([3], 48, 16, torch.bfloat16, session_seed)
    error = ValueError if type(num_blocks) is int else TypeError
    with pytest.raises(error, match=f"^num_blocks={num_blocks!r} is .*; pass "):
        moe_a2a.grouped_gemm(*case, num_blocks=num_blocks)


@on_device.cpu_only
def test_any_number_of_threads_gives_the_same_bits(session_seed):
    case = make_case(ROUTINGS["random"], 208, 144, torch.bfloat16, session_seed)
    one = moe_a2a.grouped_gemm(*case)
    torch.set_num_threads(3)
    try:
        assert torch.equal(moe_a2a.grouped_gemm(*case), one)
    finally:
        torch.set_num_threads(1)


@on_device.cpu_only
def test_a_forked_process_has_threads_of_its_own():
    """The parent's threads do not exist in the child, which neither runs on them nor waits for them at exit."""
    program = """
import os, torch, moe_a2a
torch.set_num_threads(3)
x, w = torch.randn(300, 48).bfloat16(), torch.randn(2, 32, 48).bfloat16()
offsets = torch.tensor([0, 200, 300], dtype=torch.int32)
before = moe_a2a.grouped_gemm(x, None, offsets, w)
for child_calls in (True, False):
    child = os.fork()
    if child == 0:
        torch.set_num_threads(3)
        assert not child_calls or torch.equal(moe_a2a.grouped_gemm(x, None, offsets, w), before)
        raise SystemExit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def layer_of_one(group, seed):
    hidden, intermediate = 48, 80
    case = make_case([1, 1, 1], hidden, intermediate, torch.bfloat16, seed)
    w_gate_up = case[3]
    with moe_a2a.ExpertParallel(
        group, num_experts=3, num_topk=2, hidden=hidden, num_max_tokens_per_rank=20, timeout=20
    ) as ep:
        x = torch.randn(11, hidden).bfloat16().to(ep.device)
        topk_idx = torch.tensor([[0, 1], [2, 0], [1, 2]] * 4)[:11].to(ep.device)
        handle = ep.dispatch(x, topk_idx, torch.ones(11, 2, device=ep.device))
        out = moe_a2a.grouped_gemm(handle.recv_x, handle.expert_row_index, handle.expert_offsets, w_gate_up, "swiglu")
        handle_lists = (handle.recv_x.clone(), handle.expert_row_index[:22].clone(), handle.expert_offsets.clone())
        assert_as_exact_as_torch(out[:22], [*handle_lists, w_gate_up], "swiglu")
        handle.release()


def test_takes_what_a_dispatch_brought(session_seed):
    on_device.run(1, layer_of_one, session_seed)


@on_device.gpu_only
def test_a_captured_graph_takes_new_lists(session_seed):
    x, row_index, offsets, w = make_case([64, 200, 0, 40], 208, 144, torch.bfloat16, session_seed)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    moe_a2a.grouped_gemm(x, row_index, offsets, w, "swiglu")  # loads the kernels
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        out = moe_a2a.grouped_gemm(x, row_index, offsets, w, "swiglu")
    for counts in ([300, 0, 4, 0], [1, 1, 1, 301], [0, 0, 0, 304]):
        offsets.copy_(torch.tensor([0, *counts]).cumsum(0))
        row_index.copy_(row_index.flip(0))
        graph.replay()
        assert_as_exact_as_torch(out, [x, row_index, offsets, w], "swiglu")


@on_device.gpu_only
def test_two_streams_at_once(session_seed):
    cases = [make_case([500, 0, 300, 77], 1040, 528, torch.bfloat16, session_seed + i) for i in range(2)]
    alone = [moe_a2a.grouped_gemm(*case) for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    for _ in range(20):
        for case, stream, expected in zip(cases, streams, alone, strict=True):
            with torch.cuda.stream(stream):
                assert torch.equal(moe_a2a.grouped_gemm(*case), expected)
