"""Runs experts modules of transformers by grouped_gemm(), if it can compute what they do.

A module's computation between its two products is its own code. So we probe the module: its gate is applied to a probe, and
the result is compared with everything that the epilogue of the first product can compute.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import moe_a2a
from moe_a2a.expert_weights import GRANULARITY, KERNEL_DTYPES
from moe_a2a.integrations.experts_module import ExpertsModule, first_weight, normed, own_part

ACTIVATIONS = {
    None: lambda x, alpha: x,
    "silu": lambda x, alpha: x * torch.sigmoid(alpha * x),
    "gelu": lambda x, alpha: torch.nn.functional.gelu(x),
    "gelu_tanh": lambda x, alpha: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu2": lambda x, alpha: torch.relu(x).square(),
}
QUICK_GELU = 1.702  # gelu(x) as x * sigmoid(1.702 * x)
PROBE = (256, 32)
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Epilogue:
    """Arguments of grouped_gemm() for the first product."""

    activation: str | None
    gated: bool = False
    interleaved: bool = False
    alpha: float = 1.0
    limit: float | None = None
    up_shift: float = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        """What the epilogue computes from the sums, in PyTorch."""
        if not self.gated:
            return ACTIVATIONS[self.activation](x, self.alpha)
        gate, up = (x[..., ::2], x[..., 1::2]) if self.interleaved else x.chunk(2, dim=-1)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return ACTIVATIONS[self.activation](gate, self.alpha) * (up + self.up_shift)

    def __str__(self) -> str:
        """Only the values that differ from the defaults."""
        return ", ".join(str(v) if k == "activation" else k if v is True else f"{k}={v:g}"
                         for k, v in asdict(self).items() if v != getattr(Epilogue(None), k))  # fmt: skip


def epilogue_of(module: ExpertsModule) -> Epilogue | None:
    """None if the module computes something else. Found once per module, which synchronises with the device."""
    if "moe_a2a_epilogue" not in vars(module):
        module.moe_a2a_epilogue = _find_epilogue(module)
    return module.moe_a2a_epilogue


def why_not(module: ExpertsModule, x: Tensor, owned: range) -> str | None:
    """Why the kernels cannot run these experts on rows like x; None if they can."""
    weights = [_weight(module, name, owned) for name in (first_weight(module), "down_proj")]
    if any(w.dtype != x.dtype for w in weights) or x.dtype not in KERNEL_DTYPES:
        return f"rows are {x.dtype}, weights {weights[0].dtype}: the kernels take bfloat16 or float16 of both"
    for w in weights:
        if any(size % GRANULARITY for size in w.shape[1:]):
            return f"weights of {list(w.shape[1:])}: sizes are not multiples of {GRANULARITY}"
        if not w.is_contiguous():
            return "weights lie in memory as [in, out]; shard_experts() transposes them"
        if w.data_ptr() % 16:
            return "weights do not begin at a multiple of 16 bytes"
    return None if epilogue_of(module) is not None else "the kernels do not support its gate"


def run_by_kernels(module: ExpertsModule, owned: range, handle: moe_a2a.DispatchHandle) -> Tensor:
    """`y` for combine(), with as many rows as the handle's capacity. Does not synchronise with the host."""
    if len(owned) == 0:
        return handle.recv_x[:0]  # this rank owns no expert
    epilogue = epilogue_of(module)
    assert epilogue is not None  # checked by why_not()
    offsets = handle.expert_offsets[: len(owned) + 1]
    first, bias = _weight(module, first_weight(module), owned), _bias(module, first_weight(module), owned)
    rows = handle.expert_row_index
    inner = moe_a2a.grouped_gemm(handle.recv_x, rows, offsets, first, **asdict(epilogue), bias=bias)
    down, bias = _weight(module, "down_proj", owned), _bias(module, "down_proj", owned)
    y = moe_a2a.grouped_gemm(inner, None, offsets, down, bias=bias)
    return normed(module, y)


def _weight(module: ExpertsModule, name: str, owned: range) -> Tensor:
    """[E, out, in]"""
    weight = own_part(module, getattr(module, name), owned).detach()
    return weight.transpose(1, 2) if module.is_transposed else weight


def _bias(module: ExpertsModule, name: str, owned: range) -> Tensor | None:
    if not module.has_bias:
        return None
    return own_part(module, getattr(module, f"{name}_bias"), owned).detach().float().contiguous()


@torch.no_grad()
def _find_epilogue(module: ExpertsModule) -> Epilogue | None:
    generator = torch.Generator().manual_seed(0)
    how: dict[str, Any] = {"dtype": torch.float32, "device": generator.device}
    scales = 2.0 ** torch.linspace(-4, 12, PROBE[0], **how)[:, None]  # exceeds any limit
    probe = (scales * torch.randn(PROBE, generator=generator, **how)).to(module.down_proj.device)
    expected = module._apply_gate(probe) if module.has_gate else module.act_fn(probe)
    for epilogue in _candidates(module):
        result = epilogue(probe)
        if result.shape == expected.shape and torch.allclose(result, expected, rtol=TOLERANCE, atol=TOLERANCE):
            return epilogue
    return None


def _candidates(module: ExpertsModule) -> Iterator[Epilogue]:
    """Simple ones first. Limits and factors are taken from the module's own numbers."""
    owners = (module, getattr(module, "act_fn", None))
    values = [value for owner in owners for value in getattr(owner, "__dict__", {}).values()]
    numbers = sorted({float(value) for value in values if type(value) in (int, float) and value > 0})
    alphas = [1.0, QUICK_GELU, *numbers]
    if not module.has_gate:
        yield from (Epilogue(name, alpha=a) for name in ACTIVATIONS for a in (alphas if name == "silu" else [1.0]))
        return
    for limit, interleaved, shift in itertools.product([None, *numbers], (False, True), (0.0, 1.0)):
        for name in ACTIVATIONS:
            for alpha in alphas if name == "silu" else [1.0]:
                yield Epilogue(name, True, interleaved, alpha, limit, shift)
