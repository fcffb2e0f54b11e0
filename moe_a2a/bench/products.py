"""The two products of SwiGLU experts, by moe_a2a and by its baselines, over the rows of a dispatch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import moe_a2a
from moe_a2a import reference
from moe_a2a.devices import float8_dtype


class Products(ABC):
    """`first` returns the result of the experts' first product, `second` takes [rows, intermediate] in the same layout."""

    system: str
    is_float8 = False
    tolerance = 1e-2  # relative to the norm: bfloat16 roundings, summed in fp32
    gathers = False  # the first product reads recv_x through the list, and applies SwiGLU

    def __init__(self, w_gate_up: Tensor, w_down: Tensor):
        self.w_gate_up, self.w_down = w_gate_up, w_down

    @staticmethod
    @abstractmethod
    def why_not(device: torch.device, dtype: torch.dtype) -> str | None: ...

    def dispatch(self, ep: moe_a2a.ExpertParallel, *tokens: Tensor) -> moe_a2a.DispatchHandle:
        return ep.dispatch(*tokens)

    @abstractmethod
    def take(self, handle: moe_a2a.DispatchHandle) -> Any:
        """Returns the rows of the first product; keeps what the products need of the handle."""

    @abstractmethod
    def first(self, rows: Any) -> Any: ...

    def activate(self, inner: Any) -> Any:
        gate, up = inner.chunk(2, dim=-1)
        return F.silu(gate) * up

    @abstractmethod
    def second(self, inner: Any) -> Tensor: ...

    def rows_of(self, handle: moe_a2a.DispatchHandle, at: slice) -> Tensor:
        """The first product's input at these positions, in fp32."""
        return handle.recv_x.index_select(0, handle.expert_row_index[at]).float()

    def values(self, result: Any, at: slice) -> Tensor:
        """Rows of the result of first(), activate() or second(), in fp32."""
        return result[at].float()

    def layer(self, ep: moe_a2a.ExpertParallel, *tokens: Tensor) -> Tensor:
        handle = self.dispatch(ep, *tokens)
        inner = self.activate(self.first(self.take(handle)))
        return ep.combine(self.second(inner), handle)


class Ours(Products):
    system = "moe_a2a"
    gathers = True

    @staticmethod
    def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
        return None

    def take(self, handle: moe_a2a.DispatchHandle) -> Tensor:
        # As long as the routes, not as the handle's capacity: the baselines allocate no more either.
        self._rows, self._offsets = handle.expert_row_index[: handle.num_routes], handle.expert_offsets
        return handle.recv_x

    def first(self, rows: Tensor) -> Tensor:
        return moe_a2a.grouped_gemm(rows, self._rows, self._offsets, self.w_gate_up, "swiglu")

    def activate(self, inner: Tensor) -> Tensor:
        return inner

    def second(self, inner: Tensor) -> Tensor:
        return moe_a2a.grouped_gemm(inner, None, self._offsets, self.w_down)


class Float8(Products):
    """Rows and weights in float8, with the scales of DeepSeek-V3; values pass between the products as (values, scales)."""

    is_float8 = True
    tolerance = 8e-2  # against unquantised weights: float8 has three bits of mantissa

    def __init__(self, w_gate_up: Tensor, w_down: Tensor):
        super().__init__(w_gate_up, w_down)
        self.gate_up, self.gate_up_scales = quantized(w_gate_up, 2)
        self.down, self.down_scales = quantized(w_down, 1)

    def rows_of(self, handle: moe_a2a.DispatchHandle, at: slice) -> Tensor:
        index = handle.expert_row_index[at]
        values = handle.recv_x.view(torch.uint8).index_select(0, index).view(handle.recv_x.dtype)
        return reference.dequantize_fp8(values, handle.recv_x_scales.index_select(0, index))

    def values(self, result: Any, at: slice) -> Tensor:
        return (
            reference.dequantize_fp8(result[0][at], result[1][at]) if isinstance(result, tuple) else result[at].float()
        )


class OursFloat8(Float8, Ours):
    system = "moe_a2a fp8"

    def dispatch(self, ep: moe_a2a.ExpertParallel, *tokens: Tensor) -> moe_a2a.DispatchHandle:
        return ep.dispatch(*tokens, quantize="fp8")

    def take(self, handle: moe_a2a.DispatchHandle) -> Any:
        return super().take(handle), handle.recv_x_scales

    def first(self, rows: Any) -> Any:
        scales = {"x_scales": rows[1], "w_scales": self.gate_up_scales}
        return moe_a2a.grouped_gemm(
            rows[0], self._rows, self._offsets, self.gate_up, "swiglu", **scales, quantize_output=True
        )

    def second(self, inner: Any) -> Tensor:
        scales = {"x_scales": inner[1], "w_scales": self.down_scales}
        return moe_a2a.grouped_gemm(inner[0], None, self._offsets, self.down, **scales)


class TorchGroupedMm(Products):
    """What an engineer would compose today: gathered rows, torch._grouped_mm, SiLU(gate) * up. Reads num_routes on the host."""

    system = "torch._grouped_mm"

    @staticmethod
    def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
        if not hasattr(torch, "_grouped_mm"):
            return f"torch {torch.__version__} has no _grouped_mm"
        return None if dtype == torch.bfloat16 else "torch._grouped_mm takes bfloat16"

    def take(self, handle: moe_a2a.DispatchHandle) -> Tensor:
        self._ends = handle.expert_offsets[1:]
        return handle.recv_x.index_select(0, handle.expert_row_index[: handle.num_routes])

    def first(self, rows: Tensor) -> Tensor:
        return torch._grouped_mm(rows, self.w_gate_up.transpose(1, 2), offs=self._ends)

    def second(self, inner: Tensor) -> Tensor:
        return torch._grouped_mm(inner, self.w_down.transpose(1, 2), offs=self._ends)


class DeepGemm(Products):
    """DeepGEMM's bfloat16 kernels: each expert's rows padded to 128, copied there by dispatch(layout="expert_major")."""

    system = "DeepGEMM"
    ALIGNMENT = 128

    @staticmethod
    def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cuda":
            return "DeepGEMM runs on GPUs"
        if isinstance(module := _deep_gemm(), str):
            return module
        if not hasattr(module, "m_grouped_bf16_gemm_nt_contiguous"):
            return "this deep_gemm has no m_grouped_bf16_gemm_nt_contiguous"
        return None if dtype == torch.bfloat16 else "DeepGEMM's unscaled kernels take bfloat16"

    def dispatch(self, ep: moe_a2a.ExpertParallel, *tokens: Tensor) -> moe_a2a.DispatchHandle:
        return ep.dispatch(*tokens, layout="expert_major", expert_alignment=self.ALIGNMENT)

    def take(self, handle: moe_a2a.DispatchHandle) -> Tensor:
        num_rows = int(handle.num_routes)  # includes padding
        position = torch.arange(num_rows, dtype=torch.int32, device=handle.expert_offsets.device)
        self._experts = torch.searchsorted(handle.expert_offsets[1:].contiguous(), position, right=True).int()
        return handle.expert_x[:num_rows]

    def first(self, rows: Tensor) -> Tensor:
        return self._product(rows, self.w_gate_up)

    def second(self, inner: Tensor) -> Tensor:
        return self._product(inner, self.w_down)

    def _product(self, rows: Tensor, w: Tensor) -> Tensor:
        out = rows.new_empty(rows.shape[0], w.shape[1])
        _deep_gemm().m_grouped_bf16_gemm_nt_contiguous(rows, w, out, self._experts)
        return out


class DeepGemmFloat8(Float8, DeepGemm):
    """DeepGEMM's float8 kernels; SiLU(gate) * up is quantised in PyTorch."""

    system = "DeepGEMM fp8"

    @staticmethod
    def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
        if (why := DeepGemm.why_not(device, dtype)) is not None:
            return why
        has = hasattr(_deep_gemm(), "m_grouped_fp8_gemm_nt_contiguous")
        return None if has else "this deep_gemm has no m_grouped_fp8_gemm_nt_contiguous"

    def dispatch(self, ep: moe_a2a.ExpertParallel, *tokens: Tensor) -> moe_a2a.DispatchHandle:
        return ep.dispatch(*tokens, quantize="fp8", layout="expert_major", expert_alignment=self.ALIGNMENT)

    def take(self, handle: moe_a2a.DispatchHandle) -> Any:
        rows = super().take(handle)
        return rows, handle.expert_x_scales[: rows.shape[0]].contiguous()

    def first(self, rows: Any) -> Any:
        return self._float8_product(rows, (self.gate_up, self.gate_up_scales))

    def activate(self, inner: Any) -> Any:
        return reference.quantize_fp8(super().activate(inner), self.gate_up.dtype)

    def second(self, inner: Any) -> Tensor:
        return self._float8_product(inner, (self.down, self.down_scales))

    def _float8_product(self, rows: Any, w: Any) -> Tensor:
        out = torch.empty(rows[0].shape[0], w[0].shape[1], dtype=torch.bfloat16, device=rows[0].device)
        _deep_gemm().m_grouped_fp8_gemm_nt_contiguous(rows, w, out, self._experts)
        return out


def quantized(w: Tensor, halves: int) -> tuple[Tensor, Tensor]:
    """Quantises expert by expert: the fp32 intermediate takes four times the memory."""
    pairs = [reference.quantize_fp8_weights(of[None], halves, float8_dtype(w.device)) for of in w]
    values, scales = zip(*pairs, strict=True)
    return torch.cat([v.view(torch.uint8) for v in values]).view(values[0].dtype), torch.cat(scales)


def _deep_gemm() -> Any:
    """The module, or why it is unavailable."""
    try:
        import deep_gemm
    except Exception as error:  # a wheel for another PyTorch may raise anything
        return f"deep_gemm cannot be imported: {error}"
    return deep_gemm


ALL: tuple[type[Products], ...] = (Ours, OursFloat8, TorchGroupedMm, DeepGemm, DeepGemmFloat8)


def make_weights(num_experts: int, hidden: int, intermediate: int, like: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(like.device).manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=like.device, dtype=torch.float32).to(like.dtype)

    w_gate_up = torch.stack([random(2 * intermediate, hidden) / hidden**0.5 for _ in range(num_experts)])
    w_down = torch.stack([random(hidden, intermediate) / intermediate**0.5 for _ in range(num_experts)])
    return w_gate_up, w_down
