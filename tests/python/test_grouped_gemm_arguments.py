"""What grouped_gemm() refuses: value, limit and argument in the message, nothing launched."""

import on_device
import pytest
import torch
from gemm_cases import DEVICE, make_case

import moe_a2a

pytestmark = [on_device.TESTS, pytest.mark.usefixtures("fresh_memory_is_poisoned")]


def good():
    return make_case([3, 0, 5], 48, 32, torch.bfloat16, 0)


def refused(error, message, x=None, row_index=None, offsets=None, w=None, activation=None, **epilogue):
    case = good()
    replaced = [given if given is not None else case[i] for i, given in enumerate((x, row_index, offsets, w))]
    with pytest.raises(error, match=message):
        moe_a2a.grouped_gemm(*replaced, activation, **epilogue)


def zeros(*shape, dtype=torch.bfloat16):
    return torch.zeros(*shape, dtype=dtype, device=DEVICE)


def without_memory(tensor):
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (
            TypeError,
            "x has dtype torch.float32, expected bfloat16, float16 or float8",
            lambda: {"x": zeros(4, 48, dtype=torch.float32)},
        ),
        (ValueError, r"x has shape \[4\], expected \[rows, hidden\]", lambda: {"x": zeros(4)}),
        (ValueError, "hidden=40 .* not a positive multiple of 16", lambda: {"x": zeros(4, 40)}),
        (ValueError, r"x has strides \[96, 2\].*x.contiguous", lambda: {"x": zeros(4, 96)[:, ::2]}),
        (ValueError, r"x has strides \[52, 1\]", lambda: {"x": zeros(4, 52)[:, :48]}),
        (ValueError, r"x has strides \[0, 1\]", lambda: {"x": zeros(1, 48).expand(4, 48)}),
        (ValueError, "x requires grad", lambda: {"x": zeros(4, 48).requires_grad_()}),
        (
            TypeError,
            "w has dtype torch.float16, expected torch.bfloat16, the dtype of x",
            lambda: {"w": zeros(3, 64, 48, dtype=torch.float16)},
        ),
        (ValueError, r"w has shape \[3, 64, 32\], .*hidden=48\]", lambda: {"w": zeros(3, 64, 32)}),
        (ValueError, r"w has shape \[64, 48\]", lambda: {"w": zeros(64, 48)}),
        (ValueError, "w has no experts", lambda: {"w": zeros(0, 64, 48)}),
        (ValueError, r"w.shape\[1\]=40 is not a positive multiple of 16", lambda: {"w": zeros(3, 40, 48)}),
        (
            ValueError,
            r"w.shape\[1\]=48 is not a positive multiple of 32",
            lambda: {"w": zeros(3, 48, 48), "activation": "swiglu"},
        ),
        (ValueError, "w is not contiguous", lambda: {"w": zeros(3, 48, 64).transpose(1, 2)}),
        (ValueError, "w requires grad", lambda: {"w": zeros(3, 64, 48).requires_grad_()}),
        (TypeError, "expert_offsets has dtype torch.int64, expected torch.int32", lambda: {"offsets": zeros(4).long()}),
        (ValueError, r"expert_offsets has shape \[3\], .*= 4\]", lambda: {"offsets": zeros(3, dtype=torch.int32)}),
        (TypeError, "row_index has dtype torch.int64, expected torch.int32", lambda: {"row_index": zeros(8).long()}),
        (ValueError, r"row_index has shape \[8, 1\]", lambda: {"row_index": zeros(8, 1, dtype=torch.int32)}),
        (ValueError, "row_index is not contiguous", lambda: {"row_index": zeros(16, dtype=torch.int32)[::2]}),
        (TypeError, "x has layout Sparse; pass x.to_dense", lambda: {"x": zeros(4, 48).to_sparse()}),
        (TypeError, "w has layout Sparse; pass w.to_dense", lambda: {"w": zeros(3, 64, 48).to_sparse()}),
        (ValueError, "x has a storage of 0 bytes", lambda: {"x": without_memory(zeros(4, 48))}),
        (ValueError, 'activation="geglu" is unknown', lambda: {"activation": "geglu"}),
        (ValueError, "alpha=2.0* applies only to SiLU", lambda: {"activation": "gelu", "alpha": 2}),
        (ValueError, "limit, up_shift and interleaved apply to gate and up", lambda: {"limit": 7.0}),
        (ValueError, "limit=-1.0* is not positive", lambda: {"activation": "swiglu", "limit": -1}),
        (TypeError, "bias has dtype torch.bfloat16, expected torch.float32", lambda: {"bias": zeros(3, 64)}),
        (ValueError, r"bias has shape \[3, 32\], .*\[3, 64\]", lambda: {"bias": zeros(3, 32, dtype=torch.float32)}),
        (ValueError, "bias is not contiguous", lambda: {"bias": zeros(64, 3, dtype=torch.float32).t()}),
        (TypeError, "x is a list; pass a torch.Tensor", lambda: {"x": [[0.0] * 48]}),
        (TypeError, "bias is a float; pass a torch.Tensor or None", lambda: {"bias": 0.5}),
        (ValueError, "bias requires grad", lambda: {"bias": zeros(3, 64, dtype=torch.float32).requires_grad_()}),
    ],
)
def test_bad_arguments(error, message, change):
    refused(error, message, **change())


@on_device.cpu_only
@pytest.mark.parametrize(
    ("message", "change"),
    [
        (r"expert_offsets\[2\]=2 is not in \[3, num_routes=8\]", {"offsets": [0, 3, 2, 8]}),
        (r"expert_offsets\[3\]=9 is not in \[3, num_routes=8\]", {"offsets": [0, 3, 3, 9]}),
        (r"expert_offsets\[0\]=-1 is not in \[0", {"offsets": [-1, 3, 3, 8]}),
        (r"row_index\[1\]=4 is not in \[-1, rows of x=4\)", {"row_index": [0, 4, 0, 0, 0, 0, 0, 0]}),
        (r"row_index\[7\]=-2 is not in \[-1", {"row_index": [0, 0, 0, 0, 0, 0, 0, -2]}),
    ],
)
def test_bad_lists_are_found_on_the_cpu(message, change):
    refused(ValueError, message, **{name: torch.tensor(value, dtype=torch.int32) for name, value in change.items()})


@on_device.gpu_only
def test_tensors_on_two_devices():
    refused(ValueError, "w is on cpu, x on cuda:0", w=good()[3].cpu())


@on_device.gpu_only
def test_lists_that_no_dispatch_has_made_lead_nowhere(session_seed):
    """Rows out of range are zeros, offsets out of range are clamped: no access past the tensors."""
    x, row_index, offsets, w = make_case([30, 40, 50], 208, 144, torch.bfloat16, session_seed)
    row_index[7], row_index[8] = 1 << 30, -(1 << 30)
    expected = row_index.clone()
    expected[7:9] = -1
    assert torch.equal(moe_a2a.grouped_gemm(x, row_index, offsets, w), moe_a2a.grouped_gemm(x, expected, offsets, w))
    for wild in ([0, 1 << 30, 5, -9], [-7, 3, 2, 1 << 30]):
        moe_a2a.grouped_gemm(x, row_index, torch.tensor(wild, dtype=torch.int32, device=DEVICE), w)
    torch.cuda.synchronize()
